"""``torchdata.nodes``: each node and each sampler goes on exactly, in any epoch, or is refused."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import WeightedRandomSampler as Weighted
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Loader,
    MapStyleWrapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
    Unbatcher,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from dalsegno.data import ResumableLoader, resumable_loader
from dalsegno.errors import ConfigurationError
from data.journey import travel

LENGTH = 11


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class ByEpoch(Sampler[int]):
    """Somebody's own, whose order is a function of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(LENGTH).tolist())


class ByOwnGenerator(Sampler[int]):
    """Somebody's own, which draws while it is read."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(self.rng.integers(LENGTH))


class Stream(IterableDataset[int]):
    """Shuffled by Python's generator when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "sequential": lambda: SequentialSampler(range(LENGTH)),
    "random": lambda: RandomSampler(range(LENGTH)),
    "random, with a generator": lambda: RandomSampler(range(LENGTH), generator=seeded(5)),
    "random, with replacement": lambda: RandomSampler(range(LENGTH), replacement=True, num_samples=40),
    "weighted": lambda: Weighted([1.0, 2.0] * 5 + [3.0], LENGTH),
    "distributed": lambda: DistributedSampler(range(2 * LENGTH), 2, 1),
    "torchdata's random": lambda: StatefulRandomSampler(range(LENGTH)),
    "torchdata's distributed": lambda: StatefulDistributedSampler(range(2 * LENGTH), 2, 1),
    "of one's own, by epoch": ByEpoch,
    "of one's own, by a generator": ByOwnGenerator,
}


def numbers(sampler: Sampler[int]) -> BaseNode[Any]:
    return MapStyleWrapper({index: 100 + index for index in range(2 * LENGTH)}, sampler)


def shuffled(seed: int) -> BaseNode[Any]:
    return numbers(RandomSampler(range(LENGTH), generator=seeded(seed)))


def mixed(stop: str) -> BaseNode[Any]:
    return MultiNodeWeightedSampler({"a": shuffled(1), "b": shuffled(2)}, {"a": 2.0, "b": 1.0}, stop)


PIPELINES: dict[str, Callable[[], BaseNode[Any]]] = {
    **{f"sampler: {name}": lambda make=make: numbers(make()) for name, make in SAMPLERS.items()},
    "an iterable": lambda: IterableWrapper(range(LENGTH)),
    "an iterable that shuffles itself": lambda: IterableWrapper(Stream()),
    "threads": lambda: ParallelMapper(SamplerWrapper(RandomSampler(range(LENGTH))), str, 2),
    "threads, few snapshots": lambda: ParallelMapper(
        SamplerWrapper(RandomSampler(range(LENGTH))), str, 2, snapshot_frequency=4
    ),
    "prefetched": lambda: Prefetcher(numbers(RandomSampler(range(LENGTH))), 3),
    "prefetched threads": lambda: Prefetcher(ParallelMapper(SamplerWrapper(ByOwnGenerator()), str, 2), 3),
    "cut again": lambda: Unbatcher(Batcher(shuffled(4), 2, drop_last=False)),
    "mixed until the first ends": lambda: mixed(StopCriteria.FIRST_DATASET_EXHAUSTED),
    "mixed until all have ended": lambda: mixed(StopCriteria.ALL_DATASETS_EXHAUSTED),
    "mixed in turns": lambda: mixed(StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED),
}


def feed(name: str) -> ResumableLoader:
    return resumable_loader(Loader(Batcher(PIPELINES[name](), 3, drop_last=False)))


@pytest.mark.parametrize("name", PIPELINES)
def test_killed_anywhere(name: str) -> None:
    whole = travel(lambda: feed(name), epochs=3)
    assert len({entry[0] for entry in whole}) == 3
    for kills in ({1}, {2}, {5}, {len(whole) - 1}, {"epoch 1"}, {"epoch 1", "epoch 2"}, {1, 2, "epoch 1", 6}):
        assert travel(lambda: feed(name), 3, kills) == whole, f"killed after {kills}"


@pytest.mark.parametrize("name", PIPELINES)
def test_killed_around_an_epoch_that_was_left_early(name: str) -> None:
    whole = travel(lambda: feed(name), epochs=3, cut=2)
    for kills in ({"epoch 1"}, {1, 3}, {2, 4, "epoch 2"}):
        assert travel(lambda: feed(name), 3, kills, cut=2) == whole, f"killed after {kills}"


def test_processes() -> None:
    def make() -> ResumableLoader:
        drawn = SamplerWrapper(RandomSampler(range(LENGTH)))
        return resumable_loader(Loader(Batcher(ParallelMapper(drawn, str, 2, method="process"), 3, drop_last=False)))

    whole = travel(make, epochs=2)
    assert travel(make, 2, {2, "epoch 1", 6}) == whole
    gc.collect()  # a mapper ends its processes when it is deleted
    for process in multiprocessing.active_children():
        process.join(60)


def test_what_has_no_position_is_refused() -> None:
    disordered = ParallelMapper(SamplerWrapper(RandomSampler(range(LENGTH))), str, 2, in_order=False)
    with pytest.raises(ConfigurationError, match="use in_order=True"):
        resumable_loader(Loader(Batcher(disordered, 3)))
