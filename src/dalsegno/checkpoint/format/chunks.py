"""Chunks: the parts in which a tensor is stored, and the file of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import names
from .sharding import Box, Sharding


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor: ``name`` in ``file``."""

    file: str
    name: str
    box: Box


class Chunks(Protocol):
    """The chunks of a tensor, which cover each element exactly once."""

    def __iter__(self) -> Iterator[StoredChunk]: ...

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """Chunks with elements of ``box``."""
        ...


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """Chunks that are known one by one."""

    chunks: Sequence[StoredChunk]

    def __iter__(self) -> Iterator[StoredChunk]:
        return iter(self.chunks)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        return (chunk for chunk in self.chunks if chunk.box.common(box) is not None)


@dataclass(frozen=True, slots=True)
class ShardedChunks:
    """Chunks as they were on the ranks. None is computed before it is asked for.

    Attributes:
        component, name, shape: of the tensor.
        sharding: of the tensor on the ranks that saved it.
        replica: the column of ``sharding.owners`` with the rank that wrote each box.
        is_frozen: whether it is in the file of frozen tensors.
    """

    component: str
    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    replica: int
    is_frozen: bool

    def __iter__(self) -> Iterator[StoredChunk]:
        for number, box in enumerate(self.sharding.boxes(self.shape)):
            if 0 not in box.shape or not self.sharding.cuts:  # there may be too few rows for a rank
                yield self._chunk(number, box)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        boxes = self.sharding.boxes(self.shape)
        return (self._chunk(number, boxes[number]) for number in boxes.overlapping(box))

    def _chunk(self, number: int, box: Box) -> StoredChunk:
        name_of = names.frozen_shard if self.is_frozen else names.shard
        writer = int(self.sharding.owners[number, self.replica])
        return StoredChunk(name_of(self.component, writer), self.name, box)
