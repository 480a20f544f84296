"""What is read again is compared with what was read before: a difference is said, and nothing else is."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.data import NOT_EXACT, resumable_loader
from dalsegno.testing import tiny_regression_data
from support.models import Line
from support.resumed import stop_after
from support.small import same, small_trainer, weights

LENGTH, BATCH = 40, 4
PASSES = count()
"""Differs in each iterator of this process, as the time does."""

DATA = tiny_regression_data(LENGTH)


class Shuffled(IterableDataset[Any]):
    """From its own ``first``-th sample on, in another order at each pass."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        order = list(range(LENGTH))
        rest = order[self.first :]
        random.Random(next(PASSES)).shuffle(rest)
        yield from (DATA[index] for index in order[: self.first] + rest)


class Buffered(IterableDataset[Any]):
    """A shuffle buffer that draws from a generator that dropout uses too."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for index in range(LENGTH):
            buffer.append(index)
            if len(buffer) == 6:
                yield DATA[buffer.pop(int(torch.randint(len(buffer), ())))]
        while buffer:
            yield DATA[buffer.pop(int(torch.randint(len(buffer), ())))]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, NOT_EXACT, False)]


def train(folder: Path, data: IterableDataset[Any], *stops: int, model: torch.nn.Module | None = None) -> ds.Trainer:
    """In legs that end after ``stops``, and one to the end; all in one epoch."""
    for stop in [*stops, None]:
        trainer = small_trainer(
            folder,
            *([] if stop is None else [stop_after(stop)]),
            model=model and copy.deepcopy(model),
            parts={"train_dataset": data},
            max_steps=8,
            lr_scheduler_type="constant",
            save_steps=100,
        )
        trainer.train()
    return trainer


@pytest.mark.parametrize("first", [0, BATCH, 3 * BATCH + 1], ids=["at once", "later", "in the last batch"])
def test_an_epoch_that_is_another_when_it_is_read_again_is_said(
    first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Shuffled(first), 4)
    (warning,) = said(caplog)
    assert warning.startswith("Shuffled yields other samples when the epoch is read again")


def test_a_shuffle_buffer_is_reported_only_if_the_model_draws_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = train(tmp_path / "a", Buffered(), model=Line()), train(tmp_path / "b", Buffered(), 4, model=Line())
    assert same(weights(whole), weights(parts))
    assert said(caplog) == []
    train(tmp_path / "c", Buffered(), 4)  # with dropout
    (warning,) = said(caplog)
    assert warning.startswith("Buffered yields other samples")


class Passing(Sampler[int]):
    """Has another order at each of its passes, which it counts."""

    passes = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(LENGTH), LENGTH))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_sampler_that_counts_its_passes_is_said(
    kind: type[DataLoader[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = (resumable_loader(kind(DATA, BATCH, sampler=Passing())) for _ in range(2))
    for _ in old:
        pass
    old.next_epoch()
    next(iter(old))
    new.load_state_dict(old.state_dict())
    next(iter(new))
    (warning,) = said(caplog)
    assert warning.startswith("StackDataset yields other samples")


@dataclass
class Graph:
    edges: Tensor
    name: str = "a"


def changed(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[-1] += 1
    return other


IDS, LARGE = torch.arange(12).reshape(3, 4), torch.zeros(64, 40_000)
BATCHES: dict[str, tuple[Any, Any]] = {
    "tensors": ({"ids": IDS}, {"ids": changed(IDS)}),
    "half precision": ([IDS.bfloat16()], [changed(IDS).bfloat16()]),
    "arrays": (IDS.numpy(), changed(IDS).numpy()),
    "texts": ([IDS, ["a", "b"]], [IDS, ["a", "c"]]),
    "objects in an array": (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
    "a class of one's own": (Graph(IDS), Graph(changed(IDS))),
    "one sample of a large batch": (LARGE, changed(LARGE)),
    "the same in another form": (IDS, IDS.reshape(4, 3)),
    "labels": ({"x": IDS, "y": 1.0}, {"x": IDS, "y": 2.0}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_kind_of_batch_is_compared(name: str, caplog: pytest.LogCaptureFixture) -> None:
    before, now = BATCHES[name]
    for again, warnings in ((before, 0), (now, 1)):
        old, new = resumable_loader([before, 0]), resumable_loader([copy.deepcopy(again), 0])
        next(iter(old))
        new.load_state_dict(old.state_dict())
        next(iter(new))
        assert len(said(caplog)) == warnings


def test_a_position_that_was_loaded_is_compared_in_the_leg_after_too(caplog: pytest.LogCaptureFixture) -> None:
    """It reads nothing itself: it ends at once."""
    old, between, new = (resumable_loader([first, 0, 0]) for first in (1, 1, 2))
    next(iter(old))
    between.load_state_dict(old.state_dict())
    new.load_state_dict(between.state_dict())
    next(iter(new))
    assert len(said(caplog)) == 1
