"""A run that is killed or stopped at an epoch's end, and what it reads then: as if it had gone on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.testing import DataOrder, TinyRegression, compare_runs, tiny_regression_data
from support.listeners import Listener
from support.resumed import assert_resumes, stop_after
from support.small import arguments


class Lines(IterableDataset[Any]):
    """Like lines of a file: goes on once behind the line that was loaded, and else begins with the first."""

    def __init__(self, length: int = 10) -> None:
        self.data, self.length, self.start, self.at = tiny_regression_data(length), length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, self.length):
            self.at = index + 1
            yield self.data[index]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.at = state["at"]


class Once(Lines):
    """Has nothing more to give behind its last line."""

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield self.data[self.at - 1]


class Stuck(Lines):
    """Always begins where it was loaded."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.start, self.length):
            self.at = index + 1
            yield self.data[index]


class Around(Lines):
    """Is at its beginning again as soon as it is through. Worker 0 reads six lines, worker 1 ten."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        end = 6 if worker is None or worker.id == 0 else 10
        while self.at < end:
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def build(output_dir: Path, *callbacks: Any, loader: dict[str, Any] | None = None, **settings: Any) -> ds.Trainer:
    torch.manual_seed(0)
    data: dict[str, Any] = {"train_dataset": Lines()}
    if loader is not None:
        data = {"train_dataloader": StatefulDataLoader(**{"dataset": Lines(), "batch_size": 4, **loader})}
    return ds.Trainer(
        TinyRegression(),
        arguments(
            output_dir, **{"num_train_epochs": 3, "save_strategy": "epoch", "lr_scheduler_type": "constant", **settings}
        ),
        callbacks=[DataOrder(), *callbacks],
        **data,
    )


LOADERS = {
    "no loader": None,
    "loader": {},
    "loader with a worker process": {"num_workers": 1},
    "loader of a map dataset with a worker process": {"dataset": tiny_regression_data(10), "num_workers": 1},
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_from_the_checkpoint_of_an_epoch(tmp_path: Path, loader: dict[str, Any] | None) -> None:
    """Worker processes are seeded with the same numbers, too: a loader's own state holds them."""
    build(tmp_path / "whole", loader=loader).train()
    build(tmp_path / "parts", loader=loader).train()
    for checkpoint in sorted((tmp_path / "parts" / "checkpoints").iterdir())[:-1]:
        result = build(tmp_path / "parts", loader=loader).train(checkpoint)
        assert (result.global_step, result.reason) == (9, "finished")
        comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
        assert comparison.identical, f"\n{comparison.table()}"


def test_after_an_epoch_that_was_left_early(tmp_path: Path) -> None:
    def leave(ctx: Any) -> None:
        ctx.control.should_epoch_stop = ctx.step in (2, 4)

    def left_early(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        return build(output_dir, Listener({"on_step_end": leave}, name="leaver"), *callbacks)

    assert_resumes(left_early, tmp_path, 2, 4, 5)


@pytest.mark.parametrize("kind", [Lines, Stuck])
@pytest.mark.parametrize("loads", [False, True], ids=["dataset", "loader"])
def test_it_is_said_where_later_epochs_begin_at_the_loaded_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Lines], loads: bool
) -> None:
    for stop in (2, 99):
        data = StatefulDataLoader(kind(), batch_size=4) if loads else kind()
        args = arguments(tmp_path, num_train_epochs=3, save_steps=50, lr_scheduler_type="constant")
        given = {"train_dataloader" if loads else "train_dataset": data}
        ds.Trainer(TinyRegression(), args, callbacks=[stop_after(stop)], **given).train()
    warning = "epoch 1 starts at the loaded position, in the middle of Stuck"
    assert (warning in caplog.text) is (kind is Stuck)


def test_a_worker_that_was_through_gives_nothing_more(tmp_path: Path) -> None:
    """After a stop where one worker process, or both, had read all of their part, and the dataset begins anew then."""

    def build_around(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        settings = {"num_train_epochs": 2, "save_strategy": "epoch"}
        return build(output_dir, *callbacks, loader={"dataset": Around(), "num_workers": 2}, **settings)

    assert_resumes(build_around, tmp_path, 2, 4, 6)


def test_data_that_is_read_once_ends_in_every_leg(tmp_path: Path) -> None:
    def train() -> ds.TrainResult:
        args = arguments(tmp_path, max_steps=9, save_strategy="epoch")
        return ds.Trainer(TinyRegression(), args, train_dataset=Once()).train()

    assert [(each.global_step, each.reason) for each in (train(), train())] == [(3, "exhausted")] * 2
