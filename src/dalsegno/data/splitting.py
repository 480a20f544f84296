"""Iterable datasets that split themselves: each rank reads only its own part, at the source.

A dataset does so by a method ``split_by_rank(rank, world_size)``, which returns a rank's part: an iterable dataset
again. Those of Hugging Face and webdataset are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful

_LOADERS = {
    ("streaming", "StreamingDataset"): "streaming.StreamingDataLoader(dataset, …)",
    ("litdata", "StreamingDataset"): "litdata.StreamingDataLoader(dataset, …)",
    ("litdata", "CombinedStreamingDataset"): "litdata.StreamingDataLoader(dataset, …)",
    ("torchdata", "BaseNode"): "torchdata.nodes.Loader(node)",
}
"""Loaders that save the position in a stream, by library and class of the stream."""


def part_of_rank(source: Any, rank: int, world_size: int) -> Any | None:
    """Return this rank's part of an iterable dataset that splits itself; None if it does not, or for one rank.

    Raises:
        ConfigurationError: if only a loader of its own saves the position in it, or it is split for other ranks.
    """
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
        _expect_ranks(source, world_size, given.world_size)
        return source
    if world_size == 1:
        return None
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(source, rank=rank, world_size=world_size)


def _expect_ranks(source: Any, world_size: int, its_ranks: int) -> None:
    if its_ranks != world_size:
        raise ConfigurationError(
            f"the {type(source).__name__} is split for {its_ranks} ranks, and here {world_size} read different data; "
            "give it no split of its own, or a method split_by_rank(rank, world_size)"
        )


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
