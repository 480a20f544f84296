"""Shardings: how tensors are cut into boxes over the ranks of one or more equal meshes. Needs no torch.

A cut divides a dimension of the tensor among the ranks along a dimension of the mesh, as torch does: into parts of
equal length, rounded up, so that the last ones may be shorter or empty. Cuts are applied in order, each to the parts
that the former ones made. Along a dimension of the mesh without a cut, the ranks hold copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dalsegno.checkpoint import names

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the elements from ``offsets`` on, as many as ``shape`` in each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def common(self, other: Box) -> Box | None:
        """The elements that are in both; None if there are none."""
        begins = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(one + one_size, two + two_size)
            for one, one_size, two, two_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(tuple(begins), sizes) if all(size > 0 for size in sizes) else None

    def is_inside(self, whole: Sequence[int]) -> bool:
        return len(self.offsets) == len(self.shape) == len(whole) and all(
            begin + size <= limit for begin, size, limit in zip(self.offsets, self.shape, whole, strict=True)
        )

    def relative_to(self, other: Box) -> Box:
        """This box with offsets within ``other``, which contains it."""
        offsets = (here - there for here, there in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.shape)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of a tensor. ``offsets`` and ``sizes``: int64, shape (boxes, dimensions of the tensor)."""

    offsets: Integers
    sizes: Integers

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, number: int) -> Box:
        return Box(tuple(self.offsets[number].tolist()), tuple(self.sizes[number].tolist()))

    def __iter__(self) -> Iterator[Box]:
        return (self[number] for number in range(len(self)))

    def overlapping(self, box: Box) -> Iterator[int]:
        begins, sizes = np.array([box.offsets, box.shape], np.int64)
        ends = np.minimum(self.offsets + self.sizes, begins + sizes)
        found = (ends > np.maximum(self.offsets, begins)).all(1)
        return iter(np.flatnonzero(found).tolist())


@dataclass(frozen=True)
class Sharding:
    """How a tensor is distributed over the ``ranks`` of meshes that each hold the whole tensor, one after the other,
    each in row-major order. ``cuts``: pairs of a dimension of the ``mesh`` and the dimension of the tensor that it
    cuts, in order."""

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def replicated(cls, world_size: int) -> Sharding:
        return cls(tuple(range(world_size)), (world_size,), ())

    @classmethod
    def checked(cls, ranks: Sequence[int], mesh: Sequence[int], cuts: Sequence[Sequence[int]]) -> Sharding:
        """A sharding from lists of integers that are not negative. Raises ValueError for others."""
        pairs = tuple((mesh_dimension, dimension) for mesh_dimension, dimension in cuts)
        sharding = cls(tuple(ranks), tuple(mesh), pairs)
        cut = [dimension for dimension, _ in pairs]
        if len({*cut}) != len(cut) or not all(dimension < len(sharding.mesh) for dimension in cut):
            raise ValueError(f"the cuts {pairs} are not those of a mesh of shape {sharding.mesh}")
        if not sharding.ranks or 0 in sharding.mesh or not sharding.owners.size:  # raises if no mesh is filled
            raise ValueError(f"the ranks do not fill a mesh of shape {sharding.mesh}")
        return sharding

    @functools.cached_property
    def owners(self) -> Integers:
        """Ranks that hold each box, shape (boxes, replicas); includes boxes that are empty in some tensors."""
        cut = [1 + dimension for dimension, _ in self.cuts]
        copied = [dimension for dimension in range(1 + len(self.mesh)) if dimension not in cut]
        of_mesh = np.array(self.ranks, np.int64).reshape(-1, *self.mesh)
        return of_mesh.transpose(*cut, *copied).reshape(math.prod(self.mesh[each - 1] for each in cut), -1)

    def boxes(self, shape: tuple[int, ...]) -> Boxes:
        """Boxes of a tensor of ``shape``, in the order of :attr:`owners`."""
        return _boxes(self.mesh, self.cuts, shape)

    def box_at(self, shape: tuple[int, ...], coordinate: Sequence[int]) -> Box:
        """The box of the rank at ``coordinate`` of a mesh."""
        number = 0
        for dimension, _ in self.cuts:
            number = number * self.mesh[dimension] + coordinate[dimension]
        return self.boxes(shape)[number]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return all(dimension < len(shape) for _, dimension in self.cuts)


@functools.lru_cache(maxsize=64)
def _boxes(mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> Boxes:
    counts = tuple(mesh[dimension] for dimension, _ in cuts)
    coordinates = np.indices(counts).reshape(len(cuts), math.prod(counts))
    offsets = np.zeros((math.prod(counts), len(shape)), np.int64)
    sizes = np.tile(np.array(shape, np.int64), (len(offsets), 1))
    for (_, dimension), count, coordinate in zip(cuts, counts, coordinates, strict=True):
        whole = sizes[:, dimension].copy()
        length = -(-whole // count)
        begin = np.minimum(coordinate * length, whole)
        offsets[:, dimension] += begin
        sizes[:, dimension] = np.minimum(length, whole - begin)
    return Boxes(offsets, sizes)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor: ``name`` in ``file``."""

    file: str
    name: str
    box: Box


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
    """Chunks as they were on the ranks. None is computed before it is asked for. ``replica``: the column of
    ``sharding.owners`` with the rank that wrote each box."""

    component: str
    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    replica: int
    is_frozen: bool

    @classmethod
    def of_entry(cls, full_name: str, entry: Mapping[str, Any], shardings: Sequence[Sharding]) -> Self:
        """From a tensor's entry in ``index.json``. Raises ValueError if that is not one."""
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


Chunks = ListedChunks | ShardedChunks
"""The chunks of a tensor, which cover each element exactly once."""
