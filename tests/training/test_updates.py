"""An update is the one that a plain PyTorch loop makes, in whatever form model and data come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._dynamo.utils import counters
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import dalsegno as ds
from dalsegno.errors import ConfigurationError
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.resumed import assert_resumes
from support.small import rows, same, small_trainer, weights


def trained(output_dir: Path, *callbacks: ds.Callback, **settings: Any) -> dict[str, Tensor]:
    trainer = small_trainer(output_dir, *callbacks, **settings)
    trainer.train()
    return weights(trainer)


def with_sgd(output_dir: Path, *callbacks: ds.Callback, parts: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A linear model under plain gradient descent: rounding stays as small as it is."""
    model = Line()
    given = {"optimizer": SGD(model.parameters(), lr=0.01), **(parts or {})}
    return trained(output_dir, *callbacks, model=model, parts=given, lr_scheduler_type="constant", **settings)


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


class Batches(ds.Callback):
    """Keeps every batch, so that a plain loop can be given the same."""

    def __init__(self) -> None:
        self.all: list[dict[str, Tensor]] = []

    def on_microbatch_begin(self, ctx: Any) -> None:
        self.all.append(ctx.batch)


# --- accumulation and weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_accumulation_equals_the_big_batch(tmp_path: Path, batch_size: int, accumulation: int) -> None:
    """22 samples: two steps of eight, then one of six, whatever the micro-batches are."""
    settings = {"length": 22, "num_train_epochs": 2}
    big = with_sgd(tmp_path / "big", per_device_train_batch_size=8, **settings)
    shape = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    accumulated = with_sgd(tmp_path / "accumulated", **shape, **settings)
    assert_close(big, accumulated)


def test_a_smaller_micro_batch_counts_for_less(tmp_path: Path) -> None:
    """Eight samples as five and three: the mean over eight, not the mean of two means."""
    settings = {"length": 8, "max_steps": 1}
    whole = with_sgd(tmp_path / "whole", per_device_train_batch_size=8, **settings)
    split = with_sgd(tmp_path / "split", per_device_train_batch_size=5, gradient_accumulation_steps=2, **settings)
    assert_close(whole, split)


def test_loss_weight_weighs_micro_batches(tmp_path: Path) -> None:
    def weight(batch: dict[str, Tensor]) -> float:
        return float(batch["x"].abs().sum())

    kept, losses = Batches(), []
    note = Listener({"on_step_end": lambda ctx: losses.append(ctx.loss)})
    parts = {"loss_weight": weight}
    shape = {"length": 8, "max_steps": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 0}
    after = with_sgd(tmp_path, kept, note, parts=parts, **shape)

    model = Line()
    weighed = [(weight(batch), model(**batch)) for batch in kept.all]
    loss = sum(w * mean for w, mean in weighed) / sum(w for w, _ in weighed)
    loss.backward()
    by_hand = {name: each.detach() - 0.01 * each.grad for name, each in model.named_parameters()}
    assert_close(after, by_hand)
    assert losses == pytest.approx([loss.item()])


# --- the loop that one would write ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_as_a_plain_loop(tmp_path: Path, precision: str) -> None:
    """AdamW, linear warm-up and decay, accumulation, clipping: bit by bit."""
    kept, steps = Batches(), 6
    settings = {"max_steps": steps, "warmup_steps": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    ours = trained(tmp_path, kept, model=Line(), bf16=precision == "bf16", length=48, **settings)

    model = Line()
    groups = [{"params": [model.layer.weight]}, {"params": [model.layer.bias]}]
    optimizer = AdamW(groups, lr=0.01, weight_decay=0.0)
    factors = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
    for step in range(steps):
        for batch in kept.all[2 * step : 2 * step + 2]:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**batch)
            (loss * 0.5).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert same(ours, {name: tensor.detach() for name, tensor in model.state_dict().items()})


def test_bf16_is_not_fp32(tmp_path: Path) -> None:
    low, full = (trained(tmp_path / str(bf16), model=Line(), max_steps=3, bf16=bf16) for bf16 in (True, False))
    assert not same(low, full)
    assert {tensor.dtype for tensor in low.values()} == {torch.float32}


# --- fp16 and its scaler ----------------------------------------------------------------------------------------------


def fp16_trainer(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    """The scaler finds its scale in the first steps, as it does in real runs."""
    return small_trainer(output_dir, *callbacks, fp16=True, max_steps=12, save_steps=100, length=30)


def test_a_step_that_overflows_is_skipped_but_counted(tmp_path: Path) -> None:
    events: list[tuple[int, str]] = []
    before: list[dict[str, Tensor]] = []
    after: list[dict[str, Tensor]] = []
    rates: list[float] = []

    def overflow(ctx: Any) -> None:
        before.append({name: each.detach().clone() for name, each in ctx.model.named_parameters()})
        if ctx.state.global_step == 9:
            ctx.outputs["loss"] = ctx.outputs["loss"] * float("inf")

    def note(ctx: Any) -> None:
        after.append({name: each.detach().clone() for name, each in ctx.model.named_parameters()})
        rates.append(ctx.lr)

    handlers = {
        "on_before_backward": overflow,
        "on_step_skipped": lambda ctx: events.append((ctx.state.global_step + 1, ctx.reason)),
        "on_step_end": note,
    }
    result = fp16_trainer(tmp_path, Listener(handlers)).train()
    skipped = [step for step, _ in events]
    assert 10 in skipped
    assert 9 not in skipped
    assert "non-finite" in events[-1][1]
    assert result.global_step == len(rates) == 12
    for step in range(1, 13):
        assert same(before[step - 1], after[step - 1]) == (step in skipped), step
    for step in range(1, 12):
        assert (rates[step] == rates[step - 1]) == (step in skipped), "the schedule is held"


def test_the_scaler_goes_on_with_its_scale(tmp_path: Path) -> None:
    scales: list[float] = []
    note = Listener({"on_before_backward": lambda ctx: scales.append(ctx.outputs["loss"].item())})
    assert_resumes(lambda folder, *more: fp16_trainer(folder, note, *more), tmp_path, 1, 10)


# --- data of every kind -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Eighteen samples in order; no length, no state."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = tiny_regression_data(18)
        return iter([data[index] for index in range(18)])


class PlacedStream(Stream):
    """The same, with a place that it knows."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = tiny_regression_data(18)
        while self.place < 18:
            self.place += 1
            yield data[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def shuffled_loader() -> DataLoader[Any]:
    return DataLoader(tiny_regression_data(18), batch_size=4, shuffle=True)


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "map": lambda: {"train_dataset": tiny_regression_data(18)},
    "iterable": lambda: {"train_dataset": Stream()},
    "iterable with state": lambda: {"train_dataset": PlacedStream()},
    "a loader": lambda: {"train_dataset": None, "train_dataloader": shuffled_loader()},
    "a list of batches": lambda: {
        "train_dataset": None,
        "train_dataloader": [rows(tiny_regression_data(18), range(i, i + 3)) for i in range(0, 15, 3)],
    },
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("by", ["epochs", "steps"])
def test_any_data(tmp_path: Path, kind: str, by: str) -> None:
    """Five steps an epoch each time; stopped inside an epoch and at an epoch's last step."""
    length = {"num_train_epochs": 3} if by == "epochs" else {"max_steps": 13}

    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        settings = {"lr_scheduler_type": "constant", "save_steps": 100, **length}
        return small_trainer(output_dir, *more, parts=DATA[kind](), **settings)

    last = assert_resumes(build, tmp_path, 3, 5, 9)
    assert last.state.global_step == (15 if by == "epochs" else 13)
    assert int(last.state.epoch) == (3 if by == "epochs" else 2)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2.5, 13), (0.3, 2)])
def test_epochs_may_be_broken(tmp_path: Path, epochs: float, steps: int) -> None:
    assert small_trainer(tmp_path, length=18, num_train_epochs=epochs).train().global_step == steps


def test_max_steps_wins_over_epochs(tmp_path: Path) -> None:
    assert small_trainer(tmp_path, length=8, num_train_epochs=1, max_steps=7).train().global_step == 7


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_the_same_under_the_same_names(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", model=Line(), max_steps=3)
    counters.clear()
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    compiled = trained(tmp_path / "compiled", model=Line(), **settings)
    assert counters["frames"]["ok"] > 0
    assert_close(plain, compiled)


@register_backend
def notes_its_mode(graph: torch.fx.GraphModule, inputs: list[Any], mode: str = "none") -> Any:
    """A backend with modes."""
    modes.append(mode)
    return graph


modes: list[str] = []


def test_the_mode_of_a_compiled_model_reaches_its_backend(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_mode": "fast", "max_steps": 1}
    trained(tmp_path / "fast", model=Line(), torch_compile_backend="notes_its_mode", **settings)
    assert modes == ["fast"]
    with pytest.raises(ConfigurationError, match=r"torch_compile_mode='fast': .*reduce-overhead, max-autotune"):
        trained(tmp_path / "unknown", model=Line(), **settings)
    with pytest.raises(ConfigurationError, match=r"torch_compile_backend='inducter'"):
        trained(tmp_path / "unknown", model=Line(), torch_compile_backend="inducter", **settings)


@register_backend
def rounds_by_kernel(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend whose kernels for any size round otherwise than those for one size."""
    is_general = any(isinstance(each, torch.SymInt) for each in inputs)

    def compute(*values: Any) -> Any:
        return tuple(value * (1 + 2**-20) if is_general else value for value in graph(*values))

    return compute


@pytest.mark.parametrize("stop", [2, 5])
def test_a_compiled_model_meets_a_smaller_batch_first_after_a_resume(tmp_path: Path, stop: int) -> None:
    """Ten samples: the third batch of an epoch has two, where the others have four."""
    settings = {"torch_compile": True, "torch_compile_backend": "rounds_by_kernel", "num_train_epochs": 2}

    def build(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        torch._dynamo.reset()  # as in another process
        return small_trainer(output_dir, *callbacks, model=Line(), length=10, save_steps=100, **settings)

    assert_resumes(build, tmp_path, stop)


class Outputs:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("form", ["tensor", "attribute", "key", "loss_fn"])
def test_a_loss_in_any_form(tmp_path: Path, form: str) -> None:
    class Model(Line):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            if form == "loss_fn":
                return self.layer(x)
            loss = super().forward(x, y)
            return {"tensor": loss, "attribute": Outputs(loss), "key": {"loss": loss}}[form]

    def mean_square(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["y"])

    parts = {"loss_fn": mean_square} if form == "loss_fn" else {}
    ours = trained(tmp_path / form, model=Model(), parts=parts, max_steps=3)
    assert same(ours, trained(tmp_path / "tensor", model=Line(), max_steps=3))


def test_a_model_without_a_loss_is_told_what_to_return(tmp_path: Path) -> None:
    class Model(Line):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    trainer = small_trainer(tmp_path, model=Model(), max_steps=1)
    with pytest.raises(ConfigurationError, match=r"a tensor of shape \(4, 1\) and no loss; .* pass loss_fn"):
        trainer.train()
