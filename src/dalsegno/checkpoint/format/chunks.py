"""Chunks: the parts in which a tensor is stored, and the file of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

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

    @classmethod
    def of_entry(cls, full_name: str, entry: Mapping[str, Any], shardings: Sequence[Sharding]) -> Self:
        """From a tensor's entry in ``index.json``.

        Raises:
            ValueError: if its sharding is none of ``shardings``, or does not fit its shape.
        """
        shape, replica = tuple(entry["shape"]), entry.get("replica", 0)
        if not 0 <= entry["sharding"] < len(shardings):
            raise ValueError(f"{full_name}: there is no sharding {entry['sharding']}")
        sharding = shardings[entry["sharding"]]
        if not sharding.fits(shape) or not 0 <= replica < sharding.owners.shape[1]:
            raise ValueError(f"{full_name}: its sharding is not one of a tensor of shape {list(shape)}")
        component, name = names.component_and_name(full_name)
        return cls(component, name, shape, sharding, replica, entry.get("frozen", False))

    def __iter__(self) -> Iterator[StoredChunk]:
        for number, box in enumerate(self.sharding.boxes(self.shape)):
            if 0 not in box.shape or not self.sharding.cuts:  # there may be too few rows for a rank
                yield self._chunk(number, box)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        boxes = self.sharding.boxes(self.shape)
        return (self._chunk(number, boxes[number]) for number in boxes.overlapping(box))

    def _chunk(self, number: int, box: Box) -> StoredChunk:
        writer = int(self.sharding.owners[number, self.replica])
        return StoredChunk(names.shard(self.component, writer, is_frozen=self.is_frozen), self.name, box)
