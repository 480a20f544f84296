"""An iterable dataset on several ranks: every rank reads the same stream, and keeps every W-th sample of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from dalsegno.distributed.rng import WORKER, mix, seed_generators
from dalsegno.stateful.component import Stateful

from .loader import Counted


class RankShard(IterableDataset[Counted]):
    """Takes the stream in groups of ``world_size`` samples and keeps sample number ``rank`` of each.

    So all ranks stand at the same place of the stream, always at the end of a group, and know how many true samples a
    group has. In an incomplete last group, the ranks that go empty get its first sample as padding (none of the
    group's samples is used where ``drop_last`` is set).

    Worker processes split the stream as torch says, by ``get_worker_info()`` in the dataset. There the random
    generators are seeded once per micro-batch, from (seed, epoch, worker, place in its stream, rank).

    The state of the dataset, or of its iterator, travels along if it has one.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int, batch_size: int, seed: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.epoch = 0
        self._groups = 0
        self._ended = False
        self._iterator: Iterator[Any] | None = None
        self._iterator_state: Any = None
        self._resumed = False

    def __len__(self) -> int:
        """Samples of this rank; TypeError where the dataset has no length."""
        length: int = len(self.dataset)
        return length // self.world_size if self.drop_last else -(-length // self.world_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if set_epoch := getattr(self.dataset, "set_epoch", None):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Counted]:
        if not self._resumed:
            self._groups, self._ended, self._iterator, self._iterator_state = 0, False, None, None
        self._resumed = False
        return self._share()

    def _share(self) -> Iterator[Counted]:
        if self._ended:
            return
        self._iterator = iter(self.dataset)
        # Where the dataset is its own iterator, __iter__ may just have gone back to the start: loaded once more.
        if self._iterator_state is not None and isinstance(self._iterator, Stateful):
            self._iterator.load_state_dict(self._iterator_state)
        self._iterator_state = None
        while not self._ended:
            if self._groups % self.batch_size == 0:
                self._seed_worker()
            group = self._next_group(self._iterator)
            self._groups += 1
            if len(group) > self.rank:
                yield Counted(group[self.rank], 1, len(group))
            elif group:
                yield Counted(group[0], 0, len(group))

    def _next_group(self, stream: Iterator[Any]) -> list[Any]:
        group: list[Any] = []
        try:
            while len(group) < self.world_size:
                group.append(next(stream))
        except StopIteration:
            self._ended = True
            return [] if self.drop_last else group
        return group

    def _seed_worker(self) -> None:
        worker = get_worker_info()
        if worker is not None:
            seed_generators(mix(WORKER, self.seed, self.epoch, worker.id, self._groups, self.rank))


class StatefulRankShard(RankShard):
    """The same for a dataset with a state."""

    def state_dict(self) -> dict[str, Any]:
        iterator_state = self._iterator_state
        if isinstance(self._iterator, Stateful):
            iterator_state = self._iterator.state_dict()
        return {
            "epoch": self.epoch,
            "groups": self._groups,
            "ended": self._ended,
            "dataset": self.dataset.state_dict(),
            "iterator": iterator_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._groups, self._ended = state["epoch"], state["groups"], state["ended"]
        self.dataset.load_state_dict(state["dataset"])
        self._iterator, self._iterator_state = None, state["iterator"]
        self._resumed = True


class RestartedStream:
    """A dataset with a state, for evaluation: each iteration begins where the first one began."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._start = copy.deepcopy(dataset.state_dict())

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.load_state_dict(copy.deepcopy(self._start))
        return iter(self.dataset)
