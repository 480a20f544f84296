"""RankShard: distributes an iterable dataset; each rank reads its own part, or all and keeps every W-th sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from dalsegno.distributed.rng import WORKER, mix, seed_generators
from dalsegno.stateful.component import Stateful

from .loader import Counted


class RankShard(IterableDataset[Counted]):
    """Reads the stream in groups of ``world_size`` samples and keeps sample number ``rank`` of each.

    So all ranks are at the same position of the stream, always at the end of a group, and know the number of true
    samples in a group. In an incomplete last group, ranks without a sample get the group's first one as padding (with
    ``drop_last`` the whole group is dropped).

    A dataset that ``is_split`` contains only this rank's samples: each is a group of its own, and the number of samples
    on all ranks is unknown.

    The dataset splits the stream among worker processes by ``get_worker_info()``, as torch documents. In a worker the
    random generators are seeded once per micro-batch, from (seed, epoch, worker, position in its stream, rank).

    The state of the dataset, or of its iterator, is saved too if it has one.
    """

    def __init__(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        batch_size: int,
        seed: int,
        drop_last: bool,
        *,
        is_split: bool = False,
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.is_split = is_split
        self._place, self._group_size = (0, 1) if is_split else (rank, world_size)
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.epoch = 0
        self._groups = 0
        self._ended = False
        self._iterator: Iterator[Any] | None = None
        self._iterator_state: Any = None
        self._resumed = False

    def __len__(self) -> int:
        """Return the number of this rank's samples; TypeError if the dataset has no length."""
        length: int = len(self.dataset)
        return length // self._group_size if self.drop_last else -(-length // self._group_size)

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
        # If the dataset is its own iterator, __iter__ may just have reset it, so its state is loaded again.
        if self._iterator_state is not None and isinstance(self._iterator, Stateful):
            self._iterator.load_state_dict(self._iterator_state)
        self._iterator_state = None
        while not self._ended:
            if self._groups % self.batch_size == 0:
                self._seed_worker()
            group = self._next_group(self._iterator)
            self._groups += 1
            if self.is_split and group:
                yield Counted(group[0], 1, None)
            elif len(group) > self._place:
                yield Counted(group[self._place], 1, len(group))
            elif group:
                yield Counted(group[0], 0, len(group))

    def _next_group(self, stream: Iterator[Any]) -> list[Any]:
        group: list[Any] = []
        try:
            while len(group) < self._group_size:
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
    """A RankShard of a dataset with a state."""

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
    """A dataset with a state, for evaluation: each iteration starts where the first one started."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._start = copy.deepcopy(dataset.state_dict())

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.load_state_dict(copy.deepcopy(self._start))
        return iter(self.dataset)
