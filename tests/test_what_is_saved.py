"""What a run saves, and what it refuses to begin with: before its first step, not at its first checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.errors import CannotSave, ConfigurationError
from support.own_loops import OwnLoop
from support.small import Line, rows, small_trainer


class Keeps:
    """Has whatever it is given for a state, and counts its steps."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def step(self) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# --- names that are the run's own -------------------------------------------------------------------------------------

OWN = ["model", "optimizer", "settings", "trainer", "clock", "loader", "rng", "meter", "scheduler.0", "callbacks.Mine"]


def run_with(output_dir: Path, state: dict[Any, Any]) -> ds.Run:
    loop = OwnLoop(output_dir)
    return ds.Run(loop.args, model=loop.model, optimizer=loop.optimizer, loader=loop.loader, state=state)


@pytest.mark.parametrize("name", [*OWN, 3])
def test_a_name_of_the_runs_own_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"state={{{name!r}: …}}: name it otherwise; a run saves")):
        run_with(tmp_path, {name: Keeps()})


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


class Sparse(Line):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())


def in_a_sparse_buffer(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(output_dir, *callbacks, model=Sparse(), **SAVING)


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
    "a sparse buffer": (in_a_sparse_buffer, "model.graph: cannot save a Tensor with torch.sparse_coo"),
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
