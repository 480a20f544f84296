"""What a run saves, and what it refuses: before its first step, not at its first checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.errors import CannotSave, ConfigurationError, RankFailed
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
from support.models import Line
from support.own_loops import OwnLoop
from support.small import arguments, rows, small_trainer
from support.tuned import whole


class Keeps:
    """Has the given state, and counts its steps."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def step(self) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# --- names that are the run's own -------------------------------------------------------------------------------------

OWN = ["model", "optimizer", "settings", "trainer", "clock", "loader", "rng", "meter", "scheduler.0"]
OWN += ["callbacks.Mine", "model.head"]


def run_with(output_dir: Path, state: dict[Any, Any]) -> ds.Run:
    loop = OwnLoop(output_dir)
    return ds.Run(loop.args, model=loop.model, optimizer=loop.optimizer, loader=loop.loader, state=state)


@pytest.mark.parametrize("name", [*OWN, 3])
def test_a_name_of_the_runs_own_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=re.escape(f"state={{{name!r}: …}}: choose another name, a string; a run")
    ):
        run_with(tmp_path, {name: Keeps()})


def test_a_name_that_is_a_path_in_another_is_refused(tmp_path: Path) -> None:
    """The flags of a.b, and those of the part b of a, would be one."""
    with pytest.raises(ConfigurationError, match=re.escape("state={'a.b': …}: choose another name")):
        run_with(tmp_path, {"a.b": Keeps(), "a": nn.Sequential()})
    run_with(tmp_path, {"a.b": Keeps(), "ab": Keeps()})


def test_a_thing_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a object has no state_dict and load_state_dict"):
        run_with(tmp_path, {"mine": object()})


# --- states that cannot be saved --------------------------------------------------------------------------------------


class Odd:
    """Nothing that can be saved."""


class StopsAtOnce(ds.Callback):
    """Tells whether a step has ended."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.steps += 1


def in_a_scheduler(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(output_dir, *callbacks, parts={"lr_scheduler": Keeps({"seen": {1}})}, **SAVING)


def in_a_group(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    model = Line()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["owner"] = Odd()
    return small_trainer(output_dir, *callbacks, model=model, parts={"optimizer": optimizer}, **SAVING)


class WithExtra(Line):
    def get_extra_state(self) -> Any:
        return {"of": Odd()}

    def set_extra_state(self, state: Any) -> None: ...


def in_extra_state(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(output_dir, *callbacks, model=WithExtra(), **SAVING)


class Opaque(Line):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_mkldnn())


def in_an_opaque_buffer(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(output_dir, *callbacks, model=Opaque(), **SAVING)


BATCH = rows([{"x": torch.ones(8), "y": torch.ones(1)}], [0, 0])


class OddLoader(Keeps):
    """Its state is a set as soon as it is read."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            self.state = {"seen": {number}}
            yield BATCH


def in_a_loader(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    parts = {"train_dataset": None, "train_dataloader": OddLoader()}
    return small_trainer(output_dir, *callbacks, model=Line(), parts=parts, **SAVING)


class OddStream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(8):
            yield {"x": torch.ones(8), "y": torch.ones(1)}

    def state_dict(self) -> Any:
        return {"seen": {1}}

    def load_state_dict(self, state: Any) -> None: ...


def in_a_dataset(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    parts = {"train_dataset": None, "train_dataloader": StatefulDataLoader(OddStream(), batch_size=2)}
    return small_trainer(output_dir, *callbacks, model=Line(), parts=parts, **SAVING)


SAVING = {"max_steps": 4, "save_steps": 4, "lr_scheduler_type": "constant"}
UNSAVABLE: dict[str, tuple[Callable[..., ds.Trainer], str]] = {
    "a scheduler": (in_a_scheduler, "scheduler.0.seen: cannot save a set"),
    "an optimizer's group": (in_a_group, "optimizer.groups[0].owner: cannot save a Odd"),
    "the model's extra state": (in_extra_state, "model.extra._extra_state.of: cannot save a Odd"),
    "an opaque buffer": (in_an_opaque_buffer, "model.graph: cannot save a Tensor with torch._mkldnn"),
    "a loader": (in_a_loader, "loader.loader.seen: cannot save a set"),
    "a dataset in a loader": (in_a_dataset, "loader.loader."),
}


@pytest.mark.parametrize("place", UNSAVABLE)
def test_what_cannot_be_saved_is_known_before_the_first_step(tmp_path: Path, place: str) -> None:
    build, text = UNSAVABLE[place]
    counter = StopsAtOnce()
    with pytest.raises(CannotSave) as caught:
        build(tmp_path, counter).train()
    assert str(caught.value).startswith(text)
    assert counter.steps == 0
    assert not (tmp_path / "checkpoints").exists()


def test_the_users_own_state_is_rehearsed_too(tmp_path: Path) -> None:
    with (
        pytest.raises(CannotSave, match=r"^mine\.seen: cannot save a set"),
        run_with(tmp_path, {"mine": Keeps({"seen": {1}})}),
    ):
        pytest.fail("the run has begun")


class OddAfterAStep(SGD):
    """Makes a state in its first step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["owner"] = Odd()


def test_a_state_that_an_optimizer_makes_in_its_first_step_is_known_after_that(tmp_path: Path) -> None:
    model, counter = Line(), StopsAtOnce()
    optimizer = OddAfterAStep(model.parameters(), lr=0.1)
    with pytest.raises(CannotSave, match=r"^optimizer\.state\[.*owner: cannot save a Odd"):
        small_trainer(tmp_path, counter, model=model, parts={"optimizer": optimizer}, **SAVING).train()
    assert counter.steps == 1


def test_a_run_that_saves_nothing_is_not_rehearsed(tmp_path: Path) -> None:
    assert in_extra_state(tmp_path / "saves").args.saving
    trainer = small_trainer(tmp_path / "never", model=WithExtra(), max_steps=2)
    assert trainer.train().reason == "finished"


# --- what an optimizer trains -----------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return torch.tanh(self.layer(x))


class Learned(nn.Module):
    """A head, and a running mean of what it sees in training."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """outputs: (batch, 8)."""
        return nn.functional.mse_loss(self.head(outputs + self.norm(outputs)), batch["y"])


def with_learned_loss(output_dir: Path, *, own: bool = True, **settings: Any) -> tuple[ds.Trainer, Learned]:
    torch.manual_seed(0)
    model, loss_fn = Outputs(), Learned()
    optimizer = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], lr=0.01) if own else None
    trainer = small_trainer(
        output_dir,
        JsonLogger(),
        model=model,
        length=64,
        parts={"loss_fn": loss_fn, "optimizer": optimizer, "eval_dataset": tiny_regression_data(8, seed=1)},
        **{"max_steps": 8, "save_steps": 3, "eval_steps": 2, "logging_steps": 1, "save_in_background": False}
        | settings,
    )
    return trainer, loss_fn


def learned_alone(output_dir: Path) -> ds.Trainer:
    return with_learned_loss(output_dir)[0]


def learned_in_ddp(output_dir: Path) -> ds.Trainer:
    return with_learned_loss(output_dir, parallel="ddp", per_device_train_batch_size=2)[0]


def learned_in_fsdp(output_dir: Path) -> ds.Trainer:
    return with_learned_loss(output_dir, parallel="fsdp", gradient_accumulation_steps=2)[0]


@pytest.mark.parametrize(
    ("factory", "world_size"), [(learned_alone, 1), (learned_in_ddp, 2), (learned_in_fsdp, 2)], ids=["1", "ddp", "fsdp"]
)
def test_a_loss_function_that_is_trained_is_resumed(
    tmp_path: Path, factory: Callable[[Path], ds.Trainer], world_size: int
) -> None:
    kills = [FaultPlan(event=Event.STEP_BEGIN, count=5), FaultPlan(event=Event.STEP_BEGIN, count=4)]
    assert_resume_equivalent(factory, kills, folder=tmp_path, world_size=world_size)


class Unnormed(Learned):
    """Without statistics, which ranks gather from smaller batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


def learn(output_dir: Path, parallel: str, size: int, accumulation: int) -> dict[str, Any]:
    """The loss function's weights after six steps of eight samples."""
    torch.manual_seed(collectives.rank())  # rank 0's weights are meant to count
    loss_fn = Unnormed()
    args = arguments(
        output_dir,
        max_steps=6,
        parallel=parallel,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.05,
    )
    ds.Trainer(Outputs(), args, train_dataset=tiny_regression_data(64), loss_fn=loss_fn).train()
    return {name: whole(each) for name, each in loss_fn.state_dict().items()}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_of_a_loss_function_are_averaged_over_ranks(tmp_path: Path, parallel: str) -> None:
    alone = learn(tmp_path / "alone", "none", 8, 1)
    first, second = run_ranks(learn, 2, tmp_path / "ranks", parallel, 2, 2)
    for name, weight in alone.items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], weight, rtol=1e-4, atol=1e-6)


def test_the_default_optimizer_trains_a_loss_function_too(tmp_path: Path) -> None:
    trainer, loss_fn = with_learned_loss(tmp_path, own=False, max_steps=2)
    before = loss_fn.head.weight.clone()
    trainer.train()
    assert not torch.equal(loss_fn.head.weight, before)


def test_an_evaluation_leaves_a_loss_function_as_it_is(tmp_path: Path) -> None:
    trainer, loss_fn = with_learned_loss(tmp_path)
    before = loss_fn.norm.running_mean.clone()  # type: ignore[union-attr]
    trainer.evaluate()
    assert torch.equal(loss_fn.norm.running_mean, before) and loss_fn.norm.training  # type: ignore[arg-type]


def test_a_checkpoint_without_the_loss_function_is_refused(tmp_path: Path) -> None:
    """As those from before it was saved are."""
    trainer, _ = with_learned_loss(tmp_path)
    contents = trainer._lifecycle._checkpoints._contents
    contents._loss.clear()
    contents._optimizer._loss_fn = None
    trainer.train()
    with pytest.raises(ds.StateMismatch, match=r"group 0, missing in the checkpoint: loss_fn/head\.bias"):
        with_learned_loss(tmp_path, max_steps=9)[0].train()


def test_a_loss_function_of_another_shape_is_refused(tmp_path: Path) -> None:
    trainer, _ = with_learned_loss(tmp_path)
    trainer.train()
    other, loss_fn = with_learned_loss(tmp_path, max_steps=9)
    loss_fn.register_buffer("more", torch.zeros(1))
    with pytest.raises(
        ds.StateMismatch, match=r"loss_fn: the checkpoint does not fit this .*\n.*missing.*: more \[1\]"
    ):
        other.train()


class Sharing(nn.Module):
    """Uses a weight of the model, and has another one."""

    def __init__(self, model: Outputs) -> None:
        super().__init__()
        self.layer, self.scale = model.layer, nn.Parameter(torch.ones(1))

    def forward(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return ((outputs @ self.layer.weight).mean(1, keepdim=True) * self.scale - batch["y"]).square().mean()


def shared_weights(output_dir: Path, parallel: str, max_steps: int = 4) -> tuple[float, float]:
    model = Outputs()
    loss_fn = Sharing(model)
    parts = {"loss_fn": loss_fn}
    small_trainer(output_dir, model=model, parts=parts, max_steps=max_steps, save_steps=2, parallel=parallel).train()
    return loss_fn.scale.item(), model.layer.weight.sum().item()


def test_a_weight_that_a_loss_function_shares_is_saved_once(tmp_path: Path) -> None:
    trained = shared_weights(tmp_path, "none")
    saved = sorted(path.parent.name for path in tmp_path.glob("checkpoints/step-00000004/*/shard-00000.safetensors"))
    assert saved == ["loss_fn", "model", "optimizer"]
    assert shared_weights(tmp_path, "none") == trained
    index = json.loads((tmp_path / "checkpoints/step-00000004/index.json").read_text())
    assert [name for name in index["tensors"] if name.startswith("loss_fn.")] == ["loss_fn.scale"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_loss_function_that_shares_a_weight_over_ranks_is_refused(tmp_path: Path, parallel: str) -> None:
    with pytest.raises(RankFailed, match=r"ConfigurationError: loss_fn: Sharing shares layer\.weight with the model"):
        run_ranks(shared_weights, 2, tmp_path, parallel)


def test_gradients_of_a_loss_function_cannot_be_freed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="fuse_optim_with_backward=True: loss_fn has its own parameters"):
        with_learned_loss(tmp_path, fuse_optim_with_backward=True, max_grad_norm=0)


def strange_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


class LeavesOut(Line):
    """Its checkpoint has no bias."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        state = super().state_dict(*args, **named)
        return {name: each for name, each in state.items() if name != "layer.bias"}


OPTIMIZERS: dict[str, tuple[type[nn.Module], Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "another model's": (
        Line,
        lambda model: SGD(Line().parameters(), lr=0.1),
        "none of the parameters of this SGD is",
    ),
    "one too many": (Line, strange_optimizer, r"no checkpoint .* \(group 0, parameter 2, of shape \[3\]\)"),
    "one that is left out": (
        LeavesOut,
        lambda model: SGD(model.parameters(), lr=0.1),
        r"group 0, parameter 1, of shape",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["Trainer", "Run"])
def test_an_optimizer_that_trains_what_is_not_saved_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    build, optimizer_of, text = OPTIMIZERS[name]
    model = build()
    with pytest.raises(ConfigurationError, match=text):
        if kind == "Trainer":
            small_trainer(tmp_path, model=model, parts={"optimizer": optimizer_of(model)})
        else:
            ds.Run(arguments(tmp_path), model=model, optimizer=optimizer_of(model), loader=[BATCH])


def test_an_optimizer_in_state_without_its_module_is_told_apart(tmp_path: Path) -> None:
    model, log_alpha = Line(), torch.zeros(1, requires_grad=True)

    def build(state: dict[str, Any]) -> ds.Run:
        optimizer = SGD(model.parameters(), lr=0.1)
        return ds.Run(arguments(tmp_path), model=model, optimizer=optimizer, loader=[BATCH], state=state)

    state = {"od": SGD([log_alpha], lr=0.1)}
    with pytest.raises(
        ConfigurationError,
        match=r"^state=\{'od': …\}: it trains what no checkpoint .* Pass its module, too, or a dict with the tensor",
    ):
        build(state)
    build({**state, "kept": {"log_alpha": log_alpha}})


class Holder:
    """Has a parameter in its state."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(1))

    def state_dict(self) -> Any:
        return {"scale": self.scale.detach()}

    def load_state_dict(self, state: Any) -> None:
        self.scale.data.copy_(state["scale"])


def in_state(output_dir: Path, thing: Any, parameters: list[nn.Parameter], max_steps: int) -> float:
    """Train with a scale beside the model; the scale."""
    torch.manual_seed(0)
    model = Line()
    optimizer = SGD([*model.parameters(), *parameters], lr=0.1)
    args = arguments(output_dir, max_steps=max_steps, save_steps=1)
    with ds.Run(args, model=model, optimizer=optimizer, loader=[BATCH] * 4, state={"beside": thing}) as run:
        for batch in run.batches():
            loss = model(**batch) * parameters[0].square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    return float(parameters[0].detach().sum())


@pytest.mark.parametrize("kind", ["module", "holder"])
def test_what_is_in_state_may_be_trained(tmp_path: Path, kind: str) -> None:
    def train(name: str, max_steps: int) -> float:
        thing: Any = nn.Linear(1, 1, bias=False) if kind == "module" else Holder()
        parameter = thing.weight if kind == "module" else thing.scale
        nn.init.ones_(parameter)
        return in_state(tmp_path / name, thing, [parameter], max_steps)

    train("cut", 2)
    assert train("cut", 4) == train("whole", 4)


def test_a_part_of_the_model_may_be_trained(tmp_path: Path) -> None:
    model = Line()
    model.layer.weight.requires_grad_(False)
    trainer = small_trainer(tmp_path, model=model, parts={"optimizer": SGD([model.layer.bias], lr=0.1)}, max_steps=2)
    assert trainer.train().reason == "finished"
