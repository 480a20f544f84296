"""Iterable datasets on several ranks: those that split themselves, and RankShard for all others.

Of the first kind, each rank reads only its own part, at the source.

A dataset does so by a method ``split_by_rank(rank, world_size)``, which returns a rank's part: an iterable dataset
again. Those of Hugging Face and webdataset are known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from dalsegno.distributed import collectives
from dalsegno.distributed.rng import WORKER, mix, seed_generators
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful

from .loader import Counted

_LOADERS = {
    ("streaming", "StreamingDataset"): "streaming.StreamingDataLoader(dataset, …)",
    ("litdata", "StreamingDataset"): "litdata.StreamingDataLoader(dataset, …)",
    ("litdata", "CombinedStreamingDataset"): "litdata.StreamingDataLoader(dataset, …)",
    ("torchdata", "BaseNode"): "torchdata.nodes.Loader(node)",
    ("torchdata", "Loader"): "this Loader",
}
"""Loaders that save the position in a stream, by library and class of the stream."""


def part_of_rank(source: Any, rank: int, world_size: int) -> Any | None:
    """Return this rank's part of an iterable dataset that splits itself; None if it does not, or for one rank. Raises
    ConfigurationError if only a loader of its own saves the position in it, or it is split for other ranks."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(source).__mro__}
    for kind in kinds & _LOADERS.keys():
        raise ConfigurationError(
            f"a {type(source).__name__} of {kind[0]} saves its position through its loader: pass "
            f"train_dataloader={_LOADERS[kind]}, which splits it between the ranks, too"
        )
    if callable(split := getattr(source, "split_by_rank", None)):
        return split(rank, world_size) if world_size > 1 else None
    if ("datasets", "IterableDataset") in kinds:
        return _part_of_hugging_face(source, rank, world_size)
    if ("webdataset", "DataPipeline") in kinds:
        return _part_of_webdataset(source, rank, world_size)
    return None


def keeps_its_place(source: Any) -> bool:
    """Whether the state of an iterable dataset contains all that follows: not with a shuffle buffer of Hugging Face."""
    waiting = [getattr(source, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return False
        waiting += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else []
        waiting += getattr(part, "ex_iterables", [])
    return isinstance(source, Stateful)


def _part_of_hugging_face(source: Any, rank: int, world_size: int) -> Any | None:
    given = source._distributed
    if given is not None:  # split by the user
        if given.world_size != world_size:
            raise ConfigurationError(
                f"the {type(source).__name__} is split for {given.world_size} ranks, and here {world_size} read "
                "different data; give it no split of its own, or a method split_by_rank(rank, world_size)"
            )
        return source
    if world_size == 1:
        return None
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(source, rank=rank, world_size=world_size)


def _part_of_webdataset(source: Any, rank: int, world_size: int) -> WebDatasetPart:
    """Split it by data ranks where it would split itself by ranks; a splitter of the user's own is left alone."""
    from webdataset import single_node_only, split_by_node

    ranks, known, own = collectives.world_size(), (split_by_node, single_node_only), _ShardsOf(rank, world_size)
    part = source.compose()  # a copy
    part.pipeline = [own if stage in known else stage for stage in source.pipeline]
    if ranks != world_size and own not in part.pipeline:
        raise ConfigurationError(
            f"the {type(source).__name__} may split itself for {ranks} ranks, and here {world_size} read different "
            "data; give it nodesplitter=webdataset.split_by_node, or a method split_by_rank(rank, world_size)"
        )
    return WebDatasetPart(part)


@dataclass(frozen=True, slots=True)
class _ShardsOf:
    """A stage of a webdataset pipeline that keeps the shards of one data rank."""

    rank: int
    world_size: int

    def __call__(self, shards: Iterable[Any]) -> Iterator[Any]:
        return islice(shards, self.rank, None, self.world_size)


class WebDatasetPart:
    """One rank's part of a webdataset pipeline, with the epoch set at its start.

    ``detshuffle`` counts epochs in this process, so a resumed run would begin with the first one's order again.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def set_epoch(self, epoch: int) -> None:
        for stage in self._pipeline.pipeline:
            if hasattr(stage, "epoch"):
                stage.epoch = epoch - 1  # each pass begins by adding 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pipeline)


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
            if self._groups % self.batch_size == 0 and (worker := get_worker_info()) is not None:
                seed_generators(mix(WORKER, self.seed, self.epoch, worker.id, self._groups, self.rank))
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
