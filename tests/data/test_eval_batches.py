"""What is evaluated on, read by callbacks: from the first batch, on their own time, and without a trace in the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import dalsegno as ds
from dalsegno.data import NOT_EXACT
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.small import rows, same, small_trainer, weights

DATA = tiny_regression_data(10, seed=1)


class Stream(IterableDataset[Any]):
    """Of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        return (DATA[index] for index in range(10))


def train(output_dir: Path, handlers: dict[str, Any], **parts: Any) -> ds.Trainer:
    trainer = small_trainer(
        output_dir, Listener(handlers), parts=parts, max_steps=4, eval_steps=2, per_device_eval_batch_size=4
    )
    trainer.train()
    return trainer


of_each_kind = pytest.mark.parametrize("data", [DATA, Stream()], ids=["map", "iterable"])


@of_each_kind
def test_all_batches_come_in_order_each_time(tmp_path: Path, data: Any) -> None:
    read: list[list[Any]] = []
    train(tmp_path, {"on_evaluate": lambda ctx: read.append(list(ctx.eval_dataloader))}, eval_dataset=data)
    expected = [rows(DATA, indices) for indices in (range(4), range(4, 8), range(8, 10))]
    assert len(read) == 2
    for batches in read:
        assert all(same(mine, yours) for mine, yours in zip(batches, expected, strict=True))


@of_each_kind
def test_the_run_does_not_feel_it(tmp_path: Path, data: Any) -> None:
    """Nor one that is broken off and kept, and let go of in the middle of an evaluation."""
    metrics: dict[str, list[float]] = {"read": [], "left alone": []}
    kept: list[Any] = []

    def note(name: str) -> Any:
        return lambda ctx: metrics[name].append(ctx.metrics["eval_loss"])

    def read(ctx: Any) -> None:
        list(ctx.eval_dataloader)
        kept.append(iter(ctx.eval_dataloader))
        next(kept[-1])

    def let_go(ctx: Any) -> None:
        kept.clear()

    parts = {"eval_dataset": data}
    handlers = {"on_step_end": read, "on_prediction_step": let_go, "on_evaluate": note("read")}
    trained = train(tmp_path / "read", handlers, **parts)
    alone = train(tmp_path / "alone", {"on_evaluate": note("left alone")}, **parts)
    assert metrics["read"] == metrics["left alone"]
    assert same(weights(trained), weights(alone))


class Onwards(Stream):
    """Goes on where the last iteration ended, with the same samples if there are only so many."""

    def __init__(self, samples: int) -> None:
        self.places = itertools.cycle(range(samples))

    def __iter__(self) -> Iterator[Any]:
        return (DATA[index] for index in itertools.islice(self.places, 4))


class Drawn(Stream):
    def __iter__(self) -> Iterator[Any]:
        return (DATA[int(index)] for index in torch.randperm(10))


class Counted:
    """Changes itself, in worker processes too."""

    reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return DATA[index % 2 + (self.reads > 8)]


@pytest.mark.parametrize(
    ("part", "is_told"),
    [
        ({"eval_dataset": Onwards(10)}, True),
        ({"eval_dataloader": DataLoader(Onwards(10), batch_size=2)}, True),
        ({"eval_dataloader": iter([rows(DATA, range(4))])}, True),
        ({"eval_dataset": {"fixed": DATA, "counted": Counted()}}, True),
        ({"eval_dataset": Onwards(4)}, False),
        ({"eval_dataset": Drawn()}, False),
        ({"eval_dataloader": DataLoader(DATA, batch_size=5, shuffle=True)}, False),
    ],
)
def test_what_goes_on_between_evaluations_is_told_once(
    tmp_path: Path, part: dict[str, Any], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    small_trainer(tmp_path, parts=part, max_steps=4, eval_steps=1, per_device_eval_batch_size=4).train()
    told = [each for each in caplog.records if "begins with other samples" in each.getMessage()]
    assert [getattr(each, NOT_EXACT) for each in told] == [True] * is_told


def test_while_it_is_evaluated_on_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="eval_dataloader is being evaluated; read it in"):
        train(tmp_path, {"on_prediction_step": lambda ctx: list(ctx.eval_dataloader)}, eval_dataset=DATA)


def test_its_length_where_it_is_known(tmp_path: Path) -> None:
    lengths: list[int] = []
    train(tmp_path / "map", {"on_evaluate": lambda ctx: lengths.append(len(ctx.eval_dataloader))}, eval_dataset=DATA)
    assert lengths == [3, 3]
    with pytest.raises(TypeError, match="the length of this evaluation set is unknown"):
        train(tmp_path / "stream", {"on_evaluate": lambda ctx: len(ctx.eval_dataloader)}, eval_dataset=Stream())


def test_several_sets_are_there_by_name_and_a_loader_is_itself(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = {"on_train_begin": lambda ctx: seen.append(ctx.eval_dataloader)}
    train(tmp_path / "sets", look, eval_dataset={"long": DATA, "short": tiny_regression_data(4, seed=2)})
    assert {name: len(batches) for name, batches in seen[0].items()} == {"long": 3, "short": 1}
    loader = DataLoader(DATA, batch_size=5)
    train(tmp_path / "loader", look, eval_dataloader=loader)
    assert seen[1] is loader
    train(tmp_path / "none", look)
    assert not seen[2]
