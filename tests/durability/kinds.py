"""Kinds of data that a run may be trained on, each with random numbers of its own: the rows of the matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.distributed import collectives

LENGTH, BATCH = 11, 4
"""Samples in an epoch, and in a step, on all ranks together: three steps, the last one smaller."""

Sample = dict[str, torch.Tensor]


def sample(index: int, noise: float = 0.0) -> Sample:
    """Sample number ``index``, told from every other by its values."""
    x = torch.sin(torch.arange(8) * (index + 1.0)) + noise
    return {"x": x, "y": x.sum().reshape(1)}


def noise() -> float:
    """From each of the process's generators."""
    return random.random() + np.random.random() + torch.rand(1).item()


# -- map datasets -----------------------------------------------------------------------------------------------------


class Pure(Dataset[Sample]):
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class Augmented(Pure):
    def __getitem__(self, index: int) -> Sample:
        return sample(index, noise())


class Seeded(Pure):
    def __getitem__(self, index: int, seed: int = 0) -> Sample:
        return sample(index, np.random.default_rng(seed).random())


class OwnNumpy(Pure):
    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Sample:
        return sample(index, self.rng.random())


class OwnTorch(Pure):
    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.generators = [torch.Generator().manual_seed(3)]

    def __getitem__(self, index: int) -> Sample:
        return sample(index, torch.rand(1, generator=self.generators[0]).item())


class Hidden(Pure):
    """Its generator cannot be found from outside."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)

        def numbers() -> Iterator[float]:
            own = random.Random(0)
            while True:
                yield own.random()

        self._next = numbers().__next__

    def __getitem__(self, index: int) -> Sample:
        return sample(index, self._next())


class Counting(Pure):
    """Has a state: how often it was asked."""

    asked = 0

    def __getitem__(self, index: int) -> Sample:
        self.asked += 1
        return sample(index, self.asked / 10)

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class NoisyCollate:
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] + self.rng.random()}


# -- iterable datasets ------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Sample]):
    """The order is drawn when an iterator begins."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(self.length))
        worker = get_worker_info()
        if worker is None:
            random.shuffle(order)
        yield from map(sample, order if worker is None else order[worker.id :: worker.num_workers])


class Buffered(Stream):
    """A shuffle buffer without a state, which draws between the samples, as the model's dropout does."""

    def __iter__(self) -> Iterator[Sample]:
        buffer: list[int] = []
        for index in range(self.length):
            buffer.append(index)
            if len(buffer) == 6:
                yield sample(buffer.pop(int(torch.randint(len(buffer), ()))))
        while buffer:
            yield sample(buffer.pop(int(torch.randint(len(buffer), ()))))


class OwnBuffer(Buffered):
    """The same with a generator of its own."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(self.length))
        while order:
            yield sample(order.pop(self.rng.randrange(min(6, len(order)))))


class Bookmarked(IterableDataset[Sample]):
    """Keeps its place, and goes back to its beginning when it is through; each round has numbers of its own."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.at, self.rounds = length, 0, 0

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.rounds += not self.at
        while first + self.at * stride < self.length:
            self.at += 1
            yield sample(first + (self.at - 1) * stride, self.rounds / 10)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.rounds = state["at"], state["rounds"]


class Sized(Bookmarked):
    def __len__(self) -> int:
        return self.length


class Bookmark:
    """An iterator with a state, of a dataset that has one too."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Bookmark:
        return self

    def __next__(self) -> Sample:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return sample(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Iterating(Bookmarked):
    """Its iterator keeps the place."""

    def __iter__(self) -> Iterator[Sample]:
        return Bookmark(self.length)


class Packed(Bookmarked):
    """Cuts texts of unlike length into samples of eight; what is left over is in its state."""

    rest: Sequence[float] = ()

    def __iter__(self) -> Iterator[Sample]:
        while self.at < 2 * self.length:
            while len(self.rest) < 8:
                self.rest = [*self.rest, *(float(self.at + k) for k in range(1 + self.at % 7))]
                self.at += 1
            x, self.rest = torch.tensor(self.rest[:8]).sin(), self.rest[8:]
            yield {"x": x, "y": x.sum().reshape(1)}
        self.at, self.rest = 0, ()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rest": list(self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.rest = state["at"], state["rest"]


# -- samplers and loaders ---------------------------------------------------------------------------------------------


class OwnRandom(Sampler[int]):
    """Shuffles with a generator of Python's that is its own."""

    def __init__(self, length: int) -> None:
        self.length, self.rng = length, random.Random(5)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        self.rng.shuffle(order)
        yield from order


def share(data: type[Pure] = Pure) -> Any:
    """This rank's part of a map dataset."""
    whole = data()
    return (
        whole
        if collectives.world_size() == 1
        else Subset(whole, range(collectives.rank(), LENGTH, collectives.world_size()))
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def batch_size() -> int:
    return BATCH // collectives.world_size()


def loader(
    data: type[Pure] = Pure, *, workers: int, kind: type[DataLoader[Any]] = DataLoader, **options: Any
) -> dict[str, Any]:
    """``options`` are the loader's; samplers are made with this rank's data, generators anew."""
    part = share(data)
    for name in ("sampler", "batch_sampler"):
        if name in options:
            options[name] = options[name](part)
    if "generator" in options:
        options["generator"] = options["generator"]()
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size()
    return {"train_dataloader": kind(part, num_workers=workers, **options)}


def random_sampler(data: Any) -> RandomSampler:
    return RandomSampler(data, generator=generator())


def weighted(data: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + index % 3 for index in range(len(data))], len(data))


def own_random(data: Any) -> OwnRandom:
    return OwnRandom(len(data))


def in_batches(data: Any) -> BatchSampler:
    return BatchSampler(random_sampler(data), batch_size(), drop_last=False)


def distributed(*, workers: int) -> dict[str, Any]:
    whole = Pure()
    sampler = DistributedSampler(whole, collectives.world_size(), collectives.rank(), seed=3)
    return {"train_dataloader": DataLoader(whole, batch_size(), sampler=sampler, num_workers=workers)}


def streamed(make: Callable[[int], Any], kind: type[DataLoader[Any]] = DataLoader, *, workers: int) -> dict[str, Any]:
    """Each rank has a stream of its own, all equally long."""
    return {"train_dataloader": kind(make(LENGTH // collectives.world_size()), batch_size(), num_workers=workers)}


def nodes(*, workers: int) -> dict[str, Any]:
    indices = range(collectives.rank(), LENGTH, collectives.world_size())
    batches = Batcher(IterableWrapper(indices), batch_size(), drop_last=False)
    return {"train_dataloader": Loader(Mapper(batches, _batch_of))}


def _batch_of(indices: list[int]) -> Sample:
    return default_collate([sample(index) for index in indices])


class Batches:
    """An iterable of batches that is no DataLoader, and draws its order from Python's generator."""

    def __iter__(self) -> Iterator[Sample]:
        indices = list(range(collectives.rank(), LENGTH, collectives.world_size()))
        random.shuffle(indices)
        size = batch_size()
        yield from (_batch_of(indices[first : first + size]) for first in range(0, len(indices), size))


def batches(*, workers: int) -> dict[str, Any]:
    return {"train_dataloader": Batches()}


# -- the kinds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the matrix, and of the table in docs/reference/data.md."""

    what: str
    how: str
    may_change: str
    build: Callable[..., dict[str, Any]]
    """``build(workers=…)``: the data, by the names under which a Trainer takes them."""
    workers: tuple[int, ...] = (0, 2)


def dataset(make: Callable[[], Any], *, workers: int, **others: Callable[[], Any]) -> dict[str, Any]:
    return {"train_dataset": make(), **{name: other() for name, other in others.items()}}


PLACE = "its position is saved as (epoch, samples on all ranks); the order is computed from it"
ALL = "ranks, batch size, worker processes"
ITS_STATE = "torchdata's `StatefulDataLoader` saves its state, per rank and worker process"
AGAIN = "the epoch is read again up to the position, with the random generators of its start"
OWN = "generators of dataset and collate function are found and saved; in worker processes they are seeded as above"
AGAIN_TOO = "read again; generators that loader, samplers, dataset and collate function own are found and saved"
NOT_SAVED = "only the data itself could save it; a warning before the first step names what does not repeat"
LOADERS = "its own state, per rank; read again if its sampler draws numbers that this state does not contain"
NOTHING = "nothing"

KINDS: dict[str, Kind] = {
    # as train_dataset=
    "map": Kind("map dataset, shuffled or not", PLACE, ALL, partial(dataset, Pure)),
    "map, augmented": Kind(
        "… with random augmentation (`random`, `numpy.random`, `torch`)",
        "the process's generators are saved; worker processes' are seeded for each micro-batch from its position",
        NOTHING,
        partial(dataset, Augmented),
    ),
    "map, seeded": Kind(
        "… whose `__getitem__` has a parameter `seed`",
        "a number from (seed, epoch, index) for each sample",
        ALL,
        partial(dataset, Seeded),
    ),
    "map, own numpy generator": Kind("… with its own NumPy generator", OWN, NOTHING, partial(dataset, OwnNumpy)),
    "map, own torch generator": Kind("… with its own torch generator", OWN, NOTHING, partial(dataset, OwnTorch)),
    "map, hidden generator": Kind("… with random numbers from elsewhere", NOT_SAVED, NOTHING, partial(dataset, Hidden)),
    "collator": Kind(
        "map dataset, collate function with its own generator",
        OWN,
        NOTHING,
        partial(dataset, Pure, data_collator=NoisyCollate),
    ),
    "map with a state": Kind("map dataset with a `state_dict`", ITS_STATE, NOTHING, partial(dataset, Counting)),
    "stream": Kind("iterable dataset", AGAIN, "ranks, batch size", partial(dataset, Stream)),
    "stream, buffer": Kind(
        "… with a shuffle buffer that draws between samples", NOT_SAVED, NOTHING, partial(dataset, Buffered)
    ),
    "stream, own generator": Kind("… with its own generator", AGAIN_TOO, NOTHING, partial(dataset, OwnBuffer)),
    "stream with a state": Kind(
        "iterable dataset with a `state_dict`", ITS_STATE, "ranks, batch size", partial(dataset, Bookmarked)
    ),
    "stream with a state, sized": Kind("… and a length", ITS_STATE, "ranks, batch size", partial(dataset, Sized)),
    "stream with a stateful iterator": Kind(
        "… whose iterator has a `state_dict` too", ITS_STATE, "ranks, batch size", partial(dataset, Iterating), (0,)
    ),
    "packed": Kind(
        "… that packs sequences, with the leftover tokens in its `state_dict`",
        ITS_STATE,
        "ranks, batch size",
        partial(dataset, Packed),
        (0,),
    ),
    # as train_dataloader=
    "loader": Kind("`DataLoader(shuffle=True)`", AGAIN, NOTHING, partial(loader, shuffle=True)),
    "loader, augmented": Kind(
        "… of a dataset with random augmentation", AGAIN, NOTHING, partial(loader, Augmented, shuffle=True)
    ),
    "loader, persistent workers": Kind(
        "… with `persistent_workers=True` too",
        NOT_SAVED,
        NOTHING,
        partial(loader, Augmented, shuffle=True, persistent_workers=True),
        (2,),
    ),
    "loader, own generator of the dataset": Kind(
        "… of a dataset with its own generator", AGAIN_TOO, NOTHING, partial(loader, OwnNumpy, shuffle=True)
    ),
    "loader with a generator": Kind(
        "… with `generator=`", AGAIN_TOO, NOTHING, partial(loader, shuffle=True, generator=generator)
    ),
    "loader, sampler": Kind(
        "… with `sampler=RandomSampler(generator=…)`", AGAIN_TOO, NOTHING, partial(loader, sampler=random_sampler)
    ),
    "loader, sampler and generator": Kind(
        "… and `generator=`", AGAIN_TOO, NOTHING, partial(loader, sampler=random_sampler, generator=generator)
    ),
    "loader, batch sampler": Kind(
        "… with `batch_sampler=BatchSampler(RandomSampler(generator=…))`",
        AGAIN_TOO,
        NOTHING,
        partial(loader, batch_sampler=in_batches),
    ),
    "loader, weighted": Kind("… with a `WeightedRandomSampler`", AGAIN_TOO, NOTHING, partial(loader, sampler=weighted)),
    "loader, own sampler": Kind(
        "… with a sampler that has its own `random.Random`",
        AGAIN_TOO,
        NOTHING,
        partial(loader, sampler=own_random),
    ),
    "loader, distributed": Kind("… with a `DistributedSampler`", AGAIN_TOO, NOTHING, distributed),
    "loader, stream": Kind("`DataLoader` of an iterable dataset", AGAIN, NOTHING, partial(streamed, Stream)),
    "loader, buffer": Kind(
        "… with a shuffle buffer that draws between samples", NOT_SAVED, NOTHING, partial(streamed, Buffered)
    ),
    "stateful loader": Kind(
        "`StatefulDataLoader(shuffle=True)`",
        "its own state, per rank",
        NOTHING,
        partial(loader, kind=StatefulDataLoader, shuffle=True),
    ),
    "stateful loader, augmented": Kind(
        "… of a dataset with random augmentation",
        LOADERS,
        NOTHING,
        partial(loader, Augmented, kind=StatefulDataLoader, shuffle=True),
    ),
    "stateful loader with a generator": Kind(
        "… with `generator=`",
        LOADERS,
        NOTHING,
        partial(loader, kind=StatefulDataLoader, shuffle=True, generator=generator),
    ),
    "stateful loader, sampler": Kind(
        "… with `sampler=RandomSampler(generator=…)`",
        LOADERS,
        NOTHING,
        partial(loader, kind=StatefulDataLoader, sampler=random_sampler),
    ),
    "stateful loader, weighted": Kind(
        "… with a `WeightedRandomSampler`",
        LOADERS,
        NOTHING,
        partial(loader, kind=StatefulDataLoader, sampler=weighted),
    ),
    "stateful loader, stream": Kind(
        "… of an iterable dataset with a `state_dict`",
        LOADERS,
        NOTHING,
        partial(streamed, Bookmarked, StatefulDataLoader),
    ),
    "nodes": Kind("`torchdata.nodes.Loader`", "its own state, per rank", NOTHING, nodes, (0,)),
    "batches": Kind("any other iterable of batches", AGAIN, NOTHING, batches, (0,)),
}
