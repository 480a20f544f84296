"""MapLoader: reads a map dataset from any position at once; resuming reads nothing again. Samples: such a dataset for
worker processes, which are seeded by the position of their data.

Without these seeds, random numbers in a worker would depend on how many batches it has made before, which no checkpoint
can contain because workers read ahead.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NotRequired

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dalsegno.distributed.rng import LOADER, SAMPLE, WORKER, mix, seed_generators
from dalsegno.stateful.component import Scope

from .generators import OwnStates
from .loader import Counted, Microbatch, expect_kind, or_another_kind
from .sampler import IndexBatch, ResumableSampler, SamplerState, Share
from .skipped_data import Gaps, Place
from .workers import ignore_stop_signals


class MapState(SamplerState):
    kind: Literal["map"]
    generators: NotRequired[dict[str, Any]]


class MapLoader:
    """Micro-batches of a map dataset, read as those of :class:`.UserLoader`.

    ``loader`` is a torch DataLoader over :class:`Samples`, with ``sampler`` for its batches and its own generator, so
    that creating an iterator draws nothing from the global one. The state is the position behind the last micro-batch
    that was returned, not the one up to which workers have read; world size, batch size and number of workers may
    change.

    Generators that the dataset or the collate function owns are saved with the position, per rank. In worker processes
    :class:`Samples` seeds them instead.
    """

    state_schema = or_another_kind(MapState, "map")
    lockstep = True
    spare = None

    # Not torchdata's StatefulDataLoader: per micro-batch and worker, it would keep a second copy of a state that is not
    # needed, and could only load it with the same number of workers.
    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        ignore_stop_signals(loader)
        self._loader = loader
        self._sampler = sampler
        assert isinstance(loader.dataset, Samples)
        self._samples = loader.dataset
        self.own_generators = self._samples.generators
        self.epoch = 0
        self._cursor = 0

    @property
    def state_scope(self) -> Scope:
        """The position is equal on all ranks; the states of the data's own generators are not."""
        return "per_rank" if self.own_generators else "replicated"

    @property
    def position(self) -> float:
        return self.epoch + min(1.0, self._cursor / self._sampler.samples)

    @property
    def started(self) -> bool:
        return self._cursor > 0

    def __iter__(self) -> Iterator[Microbatch]:
        generator = self._loader.generator
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(mix(LOADER, self._sampler.seed, self.epoch))
        sampler, epoch = self._sampler, self.epoch
        self._cursor = sampler.begin(epoch, self._cursor)
        sampler.seek(epoch, self._cursor)
        for batch, share in self._batches():
            self._cursor = share.end
            yield Microbatch(batch, share.samples, share.global_samples)

    def _batches(self) -> Iterator[tuple[Any, Share]]:
        loader, samples = self._loader, self._samples
        if loader.num_workers or loader.pin_memory:
            return zip(loader, self._sampler.shares(self.epoch, self._cursor), strict=False)
        # Same as the loader's iterator, without its bookkeeping: saves 25 µs per batch (python -m benchmarks loop).
        collate = loader.collate_fn
        return ((collate(samples.fetch(indices)), indices.share) for indices in self._sampler)

    def next_epoch(self) -> None:
        self.epoch, self._cursor = self.epoch + 1, 0

    def restart(self) -> None:
        self._cursor = 0

    def skip(self, samples: int) -> int:
        """Skip in constant time, exactly; with ``drop_last`` in whole micro-batches."""
        whole = self._sampler.global_batch
        wanted = -(-samples // whole) * whole if self._sampler.drop_last else samples
        passed = min(wanted, self._sampler.samples - self._cursor)
        self._cursor += passed
        return passed

    @property
    def place(self) -> Place:
        return Place(self.epoch, self._cursor)

    def place_after(self, microbatches: int) -> Place:
        behind = self._cursor + microbatches * self._sampler.global_batch
        return Place(self.epoch, min(behind, self._sampler.length))

    def set_gaps(self, gaps: Gaps) -> None:
        self._sampler.set_gaps(gaps)

    def close(self) -> None:
        self._loader._iterator = None  # torch keeps persistent workers here; other workers end with their iterator

    def length(self) -> int:
        return len(self._sampler)

    def microbatches_per_epoch(self) -> int:
        return self.length()

    def samples_per_epoch(self) -> int:
        return self._sampler.samples

    def samples_per_microbatch(self) -> int:
        return self._sampler.global_batch

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        expect_kind(state, "map")
        return {**state, **self._sampler.adapt(state)}

    def state_dict(self) -> dict[str, Any]:
        state = {"kind": "map", **self._sampler.state_dict(), "epoch": self.epoch, "cursor": self._cursor}
        generators = self.own_generators.state_dict()
        return {**state, "generators": generators} if generators else state

    def check_state(self, state: Any) -> None:
        """Raises StateMismatch if the position belongs to another kind of data, or to a dataset of another length."""
        expect_kind(state, "map")
        self._sampler.check_state(state)

    def load_state_dict(self, state: Any) -> None:
        """Continue at a saved position. Raises StateMismatch if it belongs to another kind of data, or to a dataset of
        another length; or if a saved random generator of the data no longer exists."""
        self.check_state(state)
        self._sampler.load_state_dict(state)
        self.own_generators.load_state_dict(state.get("generators", {}))
        self.epoch, self._cursor = state["epoch"], state["cursor"]

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Keep the position on any number of ranks; with more ranks, several use the generators of one."""
        return [states[rank % len(states)] for rank in range(world_size)]


def takes_seed(dataset: Any) -> bool:
    """Whether the dataset's ``__getitem__`` has a parameter named ``seed``."""
    try:
        return "seed" in inspect.signature(type(dataset).__getitem__).parameters
    except (TypeError, ValueError):  # some builtins have no signature; they take no seed either
        return False


class Samples(Dataset[Any]):
    """Fetches whole micro-batches by :class:`IndexBatch`.

    A sample's seed is a pure function of (seed, epoch, index). In a worker process, Python's, NumPy's and torch's
    generators, and those that the dataset and the collate function own, are seeded once per micro-batch from (seed,
    epoch, its global position, rank).
    """

    def __init__(self, dataset: Any, rank: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.rank = dataset, rank
        self.generators = OwnStates(dataset=dataset, collate_fn=collate)
        self._takes_seed = takes_seed(dataset)

    def __getitems__(self, indices: IndexBatch) -> list[Any]:
        if get_worker_info() is not None:
            place = indices.key, indices.share.begin, self.rank
            seed_generators(mix(WORKER, *place))
            self.generators.seed(mix(WORKER, *place, number) for number in itertools.count(1))
        return self.fetch(indices)

    def fetch(self, indices: IndexBatch) -> list[Any]:
        """Return the samples at these indices, with the generators as they are."""
        if self._takes_seed:
            return [self.dataset.__getitem__(i, seed=mix(SAMPLE, indices.key, i)) for i in indices]
        if fetch_all := getattr(self.dataset, "__getitems__", None):
            return list(fetch_all(indices))
        return [self.dataset[index] for index in indices]


class StatefulSamples(Samples):
    """For a dataset with its own state, which is saved with the loader's; its samples are counted."""

    def __getitems__(self, indices: IndexBatch) -> list[Any]:
        values = super().__getitems__(indices)
        everyone = [indices.share.global_samples] + [0] * (len(values) - 1)
        return [
            Counted(value, int(indices.share.samples > 0), more) for value, more in zip(values, everyone, strict=True)
        ]

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)
