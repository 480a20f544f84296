"""Killed after any micro-batch, or between two epochs: the same batches, counts and random numbers as without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.nodes import Batcher, IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.data import ResumableLoader, resumable_loader, train_loader
from dalsegno.data.generators import OwnStates
from dalsegno.errors import StateMismatch
from data.journey import Make, travel


class Numbers(Dataset[Any]):
    """Samples 0 to length - 1, slightly changed by every random generator there is."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.random() + torch.rand(1).item()
        return torch.tensor(index + noise / 4, dtype=torch.float64)


class Seeded(Numbers):
    """Asks for a seed."""

    def __getitem__(self, index: int, seed: int = 0) -> torch.Tensor:
        return torch.tensor([index, seed & 0xFFFF])


class Counting(Numbers):
    """Has a state of its own: how often it was asked."""

    asked = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([index, self.asked])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class Stream(IterableDataset[int]):
    """No state; the order is drawn when an iterator begins, and depends on set_epoch."""

    epoch = 0

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = [1000 * self.epoch + i for i in range(self.length)]
        random.shuffle(order)
        worker = get_worker_info()
        yield from order if worker is None else sorted(order)[worker.id :: worker.num_workers]


class Bookmarked(IterableDataset[Any]):
    """Keeps its place in itself, and goes back to the start when it is through. Adds noise to its samples."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.at, self.rounds = length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield 1000 * self.rounds + self.at + random.random() / 4
        self.at = 0
        self.rounds += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.rounds = state["at"], state["rounds"]


class OwnIterator(Bookmarked):
    """Is its own iterator, and begins anew whenever one is asked for."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        self.rounds += 1
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return 1000 * self.rounds + self.at


class Forgetful(IterableDataset[Any]):
    """Goes on from a loaded place once: each later iterator begins anew. At its end it stays where it is."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.start, self.at, self.epoch = length, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        order = [1000 * self.epoch + i for i in range(self.length)]
        random.Random(self.epoch).shuffle(order)
        for index in range(start, self.length):
            self.at = index + 1
            yield order[index] + random.random() / 4

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.at = state["at"]
        self.epoch = state["epoch"]


class Rolling(Forgetful):
    """Draws its order from a generator in its state."""

    def __init__(self, length: int = 11) -> None:
        super().__init__(length)
        self.random = random.Random(3)
        self.begin: Any = self.random.getstate()

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        self.begin = self.random.getstate()
        order = list(range(self.length))
        self.random.shuffle(order)
        for index in range(start, self.length):
            self.at = index + 1
            yield order[index]
        self.begin, self.at = self.random.getstate(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begin": self.begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]
        self.random.setstate(state["begin"])


class Positioned(IterableDataset[int]):
    """litdata's and MosaicML's way: its state is made of a position that only its loader knows."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.start, self.epoch = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        order = [1000 * self.epoch + i for i in range(self.length)]
        random.Random(self.epoch).shuffle(order)
        yield from order[start:]

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        return {"start": num_samples_yielded, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.epoch = state["start"], state["epoch"]


class StreamingLoader(DataLoader[Any]):
    """The loader of such a dataset."""

    dataset: Positioned
    yielded, resumed = 0, False

    def __iter__(self) -> Any:
        if not self.resumed:
            self.dataset.epoch, self.yielded = self.dataset.epoch + 1, 0
        self.resumed = False
        for batch in super().__iter__():
            self.yielded += len(batch)
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self.dataset.state_dict(self.yielded, self.num_workers, self.batch_size or 0)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded, self.resumed = state["start"], True
        self.dataset.load_state_dict(state)


class Augmented(Numbers):
    """Has random generators of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.numpy, self.python, self.torch = np.random.default_rng(0), random.Random(0), torch.Generator()

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = self.numpy.random() + self.python.random() + torch.rand(1, generator=self.torch).item()
        return super().__getitem__(index) + noise / 8


class Mixup:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * self.random.random_sample()


class Shuffled(Sampler[int]):
    """Draws its order when it is iterated; ``lazily``: when its first index is asked for."""

    def __init__(self, length: int, lazily: bool = False) -> None:
        self.length, self.lazily, self.random = length, lazily, random.Random(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return self._drawn() if self.lazily else iter(list(self._drawn()))

    def _drawn(self) -> Iterator[int]:
        order = list(range(self.length))
        self.random.shuffle(order)
        yield from order


def dataset(make: Callable[[], Any], batch_size: int = 3, **options: Any) -> Make:
    """An option that is a class stands for a new object of it."""

    def feed() -> ResumableLoader:
        made = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        return train_loader(make(), batch_size=batch_size, seed=7, **made)

    return feed


def own_generator() -> ResumableLoader:
    numbers, generator = Numbers(11), torch.Generator().manual_seed(5)
    return resumable_loader(DataLoader(numbers, 3, sampler=RandomSampler(numbers, generator=generator)))


def two_generators() -> ResumableLoader:
    numbers = Numbers(11)
    sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(5))
    return resumable_loader(DataLoader(numbers, 3, sampler=sampler, generator=torch.Generator().manual_seed(6)))


def batched(numbers: Any, **how: Any) -> BatchSampler:
    return BatchSampler(RandomSampler(numbers, generator=torch.Generator().manual_seed(5), **how), 3, drop_last=False)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0, 2.0] * 5 + [3.0], 11)


def batches_without_length() -> ResumableLoader:
    class Batches:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([i, random.randrange(100)] for i in range(4))

    return resumable_loader(Batches())


FEEDS: dict[str, Make] = {
    "map": dataset(lambda: Numbers(11)),
    "map, in order": dataset(lambda: list(range(11)), shuffle=False),
    "map, second of two ranks": dataset(lambda: Numbers(17), rank=1, world_size=2),
    "map, drop_last": dataset(lambda: Numbers(11), drop_last=True),
    "map, seeded samples": dataset(lambda: Seeded(11)),
    "map with a state": dataset(lambda: Counting(11)),
    "map with a state, second of two ranks": dataset(lambda: Counting(17), rank=1, world_size=2),
    "stream": dataset(Stream),
    "stream, second of two ranks": dataset(lambda: Stream(13), rank=1, world_size=2),
    "stream with a state": dataset(Bookmarked),
    "stream with a state, even batches": dataset(lambda: Bookmarked(12)),
    "stream with a state, drop_last": dataset(Bookmarked, drop_last=True),
    "stream with a state, second of two ranks": dataset(lambda: Bookmarked(13), rank=1, world_size=2),
    "stream that is its own iterator": dataset(OwnIterator),
    "plain loader": lambda: resumable_loader(DataLoader(Numbers(11), 3, shuffle=True)),
    "plain loader with a generator": own_generator,
    "distributed sampler": lambda: resumable_loader(
        DataLoader(Seeded(22), 3, sampler=DistributedSampler(Seeded(22), 2, 1)), world_size=2
    ),
    "stateful loader": lambda: resumable_loader(
        StatefulDataLoader(Numbers(11), 3, shuffle=True, generator=torch.Generator().manual_seed(5))
    ),
    "stream that resumes once": dataset(Forgetful),
    "stream that resumes once, even batches": dataset(lambda: Forgetful(12)),
    "stream that resumes once, second of two ranks": dataset(lambda: Forgetful(13), rank=1, world_size=2),
    "stream with a generator in its state": dataset(Rolling),
    "stateful loader of a stream that resumes once": lambda: resumable_loader(StatefulDataLoader(Forgetful(), 3)),
    "map with generators": dataset(lambda: Augmented(11)),
    "map and collate function with generators": dataset(lambda: Augmented(11), collate_fn=Mixup),
    "map with generators, second of two ranks": dataset(lambda: Augmented(17), rank=1, world_size=2),
    "two generators": two_generators,
    "generator in a batch sampler": lambda: resumable_loader(
        DataLoader(Augmented(11), batch_sampler=batched(range(11)), collate_fn=Mixup())
    ),
    "sampler with a generator of its own": lambda: resumable_loader(DataLoader(Numbers(11), 3, sampler=Shuffled(11))),
    "stateful loader, a sampler's generator": lambda: resumable_loader(
        StatefulDataLoader(
            Augmented(11), 3, sampler=RandomSampler(range(11), generator=torch.Generator().manual_seed(5))
        )
    ),
    "stateful loader, generator in a batch sampler": lambda: resumable_loader(
        StatefulDataLoader(Numbers(11), batch_sampler=batched(range(11), replacement=True))
    ),
    "stateful loader, shuffled, generators in its dataset": lambda: resumable_loader(
        StatefulDataLoader(
            Augmented(11), 3, shuffle=True, generator=torch.Generator().manual_seed(5), collate_fn=Mixup()
        )
    ),
    "stateful loader, weighted": lambda: resumable_loader(StatefulDataLoader(Numbers(11), 3, sampler=weighted())),
    "stateful loader, sampler of one's own": lambda: resumable_loader(
        StatefulDataLoader(Numbers(11), 3, sampler=Shuffled(11))
    ),
    "stateful loader, lazy sampler of one's own": lambda: resumable_loader(
        StatefulDataLoader(Numbers(11), 3, sampler=Shuffled(11, lazily=True))
    ),
    "stateful loader, distributed": lambda: resumable_loader(
        StatefulDataLoader(Numbers(22), 3, sampler=DistributedSampler(Numbers(22), 2, 1)), world_size=2
    ),
    "loader that alone knows its stream's position": lambda: resumable_loader(StreamingLoader(Positioned(), 3)),
    "torchdata nodes": lambda: resumable_loader(Loader(Batcher(IterableWrapper(range(11)), 3, drop_last=False))),
    "no loader at all": batches_without_length,
}


@pytest.mark.parametrize("name", FEEDS)
def test_killed_anywhere(name: str) -> None:
    make = FEEDS[name]
    whole = travel(make, epochs=3)
    assert len({entry[0] for entry in whole}) == 3
    for kill in range(1, len(whole) + 1):
        assert travel(make, 3, {kill}) == whole, f"killed after micro-batch {kill}"
    assert travel(make, 3, {"epoch 1", "epoch 2"}) == whole
    assert travel(make, 3, {1, 2, "epoch 1", len(whole) - 1}) == whole


@pytest.mark.parametrize("name", FEEDS)
def test_killed_around_an_epoch_that_was_left_early(name: str) -> None:
    make = FEEDS[name]
    whole = travel(make, epochs=2, cut=2)
    assert travel(make, 2, {"epoch 1"}, cut=2) == whole
    assert travel(make, 2, {1, 3}, cut=2) == whole


WITH_WORKERS: dict[str, Make] = {
    "map": dataset(lambda: Numbers(17), num_workers=2),
    "map, persistent": dataset(lambda: Numbers(17), num_workers=2, persistent_workers=True),
    "map with a state": dataset(lambda: Counting(17), num_workers=2),
    "stream": dataset(lambda: Stream(17), num_workers=2),
    "stream with a state": dataset(Bookmarked, num_workers=2),
    "map with generators": dataset(lambda: Augmented(17), num_workers=2, collate_fn=Mixup),
    "map with generators, persistent": dataset(lambda: Augmented(17), num_workers=2, persistent_workers=True),
    "stream that resumes once": dataset(Forgetful, num_workers=2),
    "plain loader": lambda: resumable_loader(DataLoader(Numbers(17), 3, shuffle=True, num_workers=2)),
    "plain loader, generators": lambda: resumable_loader(
        DataLoader(Augmented(17), batch_sampler=batched(range(17)), num_workers=2, collate_fn=Mixup())
    ),
    "stateful loader, sampler of one's own": lambda: resumable_loader(
        StatefulDataLoader(list(range(17)), 3, sampler=Shuffled(17), num_workers=2)
    ),
    "stateful loader, shuffled": lambda: resumable_loader(
        StatefulDataLoader(list(range(17)), 3, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5))
    ),
}


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_killed_while_workers_read_ahead(name: str) -> None:
    make = WITH_WORKERS[name]
    whole = travel(make, epochs=2)
    assert travel(make, 2, {2, len(whole) // 2, "epoch 1", len(whole) - 1}) == whole


OF_THIS_SCRIPT = np.random.default_rng(0)
"""As a script has one. It is the script's to save: a run that resumed would write what the script has drawn since."""


def summed(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).sum()


def test_a_scripts_own_generator_is_left_to_it() -> None:
    loader = DataLoader([torch.tensor(1.0)], collate_fn=summed)  # type: ignore[arg-type]
    summed.rng = np.random.default_rng(1)  # type: ignore[attr-defined]
    assert list(OwnStates(loader=loader, collate_fn=summed).find()) == ["collate_fn.rng"]


def test_a_generator_that_is_gone() -> None:
    feed = dataset(lambda: Augmented(11))()
    next(iter(feed))
    state = feed.state_dict()
    with pytest.raises(StateMismatch, match=r"'dataset.numpy' of the data was saved, and now it is missing"):
        dataset(lambda: Numbers(11))().load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"'dataset.python' of the data was saved, and now it is Random"):
        dataset(lambda: Augmented(11))().load_state_dict({**state, "generators": {"dataset.python": [1, 2]}})


def test_a_stream_that_changes_where_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    class Rounds(Forgetful):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            self.epoch += 1

        def set_epoch(self, epoch: int) -> None: ...

    make = dataset(Rounds)
    travel(make, 2)
    assert not caplog.records
    travel(make, 2, {"epoch 1"})
    assert "Rounds changes its state when an iterator ends, which happens twice in a resumed run" in caplog.text
