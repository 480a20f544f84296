"""Plan which rank writes which part of the sharded tensors.

Each rank computes the plan of all ranks from what all know alike: names, dtypes, shapes and placements of the tensors.
So nothing is gathered, at any number of ranks, and all ranks get the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dalsegno.checkpoint.format import names
from dalsegno.checkpoint.format.index import Index, StoredChunk, StoredTensor
from dalsegno.checkpoint.format.layout import FileLayout, TensorChunk
from dalsegno.checkpoint.state.contract import TensorsByComponent
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import meshes_like
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file that one rank writes, with tensors of one ``component``: frozen ones, or those that training changes."""

    component: str
    writer: int
    is_frozen: bool
    layout: FileLayout

    @property
    def name(self) -> str:
        name_of = names.frozen_shard if self.is_frozen else names.shard
        return name_of(self.component, self.writer)

    def tensors(self, of: TensorsByComponent) -> list[torch.Tensor]:
        """This rank's shards in the order of the layout; not copies."""
        component = of[self.component]
        return [local_part(component[chunk.name]) for chunk in self.layout.chunks]


@dataclass(frozen=True, slots=True)
class Plan:
    """Files that this rank writes: of each component, one of frozen tensors and one of the others; on rank 0, the index
    of all ranks' files."""

    files: Sequence[FilePlan]
    absent: Mapping[str, Sequence[TensorChunk]]
    """By component, the chunks that are not saved and whose checksums this rank writes."""
    index: bytes | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the ranks that hold it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    owners: Sequence[int]


class ShardLayout:
    """How a tensor is distributed over the ranks.

    Attributes:
        chunks: its parts.
        elements: number of elements on each rank if no chunk is replicated, else None.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self._of_rank = {chunk.owners[0]: chunk for chunk in chunks}
        self.elements: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if all(len(chunk.owners) == 1 for chunk in chunks):
            self.elements = np.zeros(collectives.world_size(), np.int64)
            for rank, chunk in self._of_rank.items():
                self.elements[rank] = math.prod(chunk.shape)

    def assign_writers(
        self, loads: np.ndarray[Any, np.dtype[np.int64]], size: int, rank: int
    ) -> Iterator[tuple[int, Chunk]]:
        """Yield writer and chunk, for a tensor with elements of ``size`` bytes; add the bytes to ``loads`` per rank.

        Only chunks that ``rank`` writes, but all chunks for rank 0.
        """
        if self.elements is not None:
            loads += self.elements * size
            if rank:
                yield from ((rank, chunk) for chunk in [self._of_rank.get(rank)] if chunk is not None)
            else:
                yield from self._of_rank.items()
            return
        for chunk in self.chunks:
            writer = chunk.owners[int(loads[chunk.owners].argmin())]
            loads[writer] += math.prod(chunk.shape) * size
            if rank in (0, writer):
                yield writer, chunk


FrozenNames = Mapping[str, Collection[str]]
"""By component, the names of its frozen tensors. They are balanced among the ranks apart from the others, since most
saves write only these."""


def plan(tensors: TensorsByComponent, frozen: FrozenNames, absent: FrozenNames) -> Plan:
    """Assign each chunk to one rank; a replicated one to the rank with the least to write.

    Takes microseconds per tensor, on rank 0 per tensor and rank. So callers keep a plan as long as :func:`signature`
    is unchanged on all ranks.

    Args:
        tensors: of all components.
        frozen: names of those in files of their own.
        absent: names of those that are not saved.

    Raises:
        CannotSave: for a tensor with a partial placement.
    """
    rank = collectives.rank()
    loads = {is_frozen: np.zeros(collectives.world_size(), np.int64) for is_frozen in (False, True)}
    files: list[FilePlan] = []
    stored: dict[str, StoredTensor] = {}
    unsaved: dict[str, list[TensorChunk]] = {}
    known: dict[object, ShardLayout] = {}
    for component, its in tensors.items():
        chunks: dict[tuple[int, bool], list[TensorChunk]] = {}
        for name, tensor in its.items():
            dtype, shape = tensor.dtype, tuple(tensor.shape)
            is_frozen = name in frozen.get(component, ())
            is_absent = name in absent.get(component, ())
            stored[f"{component}.{name}"] = StoredTensor(dtype, shape, ())
            for writer, chunk in _layout_of(tensor, known).assign_writers(loads[is_frozen], dtype.itemsize, rank):
                placed = TensorChunk(name, dtype, chunk.shape, chunk.offsets, shape)
                if is_absent:
                    if writer == rank:
                        unsaved.setdefault(component, []).append(placed)
                    continue
                chunks.setdefault((writer, is_frozen), []).append(placed)
        files += [
            FilePlan(component, writer, is_frozen, FileLayout.of(of_file))
            for (writer, is_frozen), of_file in sorted(chunks.items())
        ]
    missing = {f"{component}.{name}" for component, its in absent.items() for name in its}
    index = _index(stored, files, missing).to_bytes() if rank == 0 else None
    return Plan([file for file in files if file.writer == rank], unsaved, index)


def signature(tensors: TensorsByComponent, frozen: FrozenNames) -> object:
    """Equal for tensors that have the same plan."""
    return (
        collectives.world_size(),
        {component: frozenset(names) for component, names in frozen.items()},
        [
            (
                component,
                list(its),
                [tensor.dtype for tensor in its.values()],
                [tensor.shape for tensor in its.values()],
                [(tensor.placements, tensor.device_mesh) for tensor in its.values() if type(tensor) is DTensor],
                [(place.meshes, place.placements) for each in its.values() if (place := place_of(each)) is not None],
            )
            for component, its in tensors.items()
        ],
    )


def check_ranks_match(tensors: TensorsByComponent, frozen: FrozenNames) -> None:
    """Check that all ranks hold the same tensors. Collective: one small reduction.

    Raises:
        CannotSave: on every rank, if they do not; names the first difference.
    """
    lines = [
        f"{component}.{_described(name, tensor)}{' frozen' if name in frozen.get(component, ()) else ''}"
        for component, its in tensors.items()
        for name, tensor in its.items()
    ]
    digest = xxhash.xxh3_64_intdigest("\n".join(lines).encode("utf-8", "surrogatepass")) >> 1
    highest, lowest = collectives.all_reduce_max([digest, -digest], "what all ranks hold")
    if highest == -lowest:
        return
    of_zero, *others = collectives.gather(lines, "what each rank holds")
    number, here, there = next(
        (number, here, there)
        for number, theirs in enumerate(others, start=1)
        for here, there in itertools.zip_longest(of_zero, theirs, fillvalue="nothing more")
        if here != there
    )
    raise CannotSave(
        f"the ranks hold different tensors: rank 0 has {here}, where rank {number} has {there}. All ranks need the "
        "same ones; a tensor that is sharded over the ranks must be a DTensor"
    )


def _described(name: str, tensor: torch.Tensor) -> str:
    spread = _spread(tensor)
    placement = "" if spread is None else f" {spread[1]} {spread[0].tolist()}"
    return f"{name} {list(tensor.shape)} {tensor.dtype}{placement}"


def _spread(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Placement, ...]] | None:
    """The ranks of the meshes that each hold the whole tensor, shape (meshes, ``*mesh shape``), and its placements on
    each; None if every rank holds all of it."""
    if (place := place_of(tensor)) is not None:
        ranks, shape = place.meshes
        return torch.tensor(ranks).reshape(shape), place.placements
    if isinstance(tensor, DTensor):
        return meshes_like(tensor.device_mesh), tuple(tensor.placements)
    return None


def _layout_of(tensor: torch.Tensor, known: dict[object, ShardLayout]) -> ShardLayout:
    """``known`` caches layouts, since many tensors are sharded alike."""
    shape, place = tuple(tensor.shape), place_of(tensor)
    key: object = shape
    if place is not None:
        key = (shape, place.meshes, place.placements)
    elif isinstance(tensor, DTensor):
        key = (shape, tensor.placements, tensor.device_mesh)
    if key not in known:
        spread = _spread(tensor)
        whole = [Chunk((0,) * len(shape), shape, range(collectives.world_size()))]
        known[key] = ShardLayout(whole if spread is None else list(_chunks(shape, *spread)))
    return known[key]


def _chunks(tensor: tuple[int, ...], meshes: torch.Tensor, placements: tuple[Placement, ...]) -> Iterator[Chunk]:
    """``tensor``: its shape. The other arguments are those that :func:`_spread` returns."""
    mesh: tuple[int, ...] = tuple(meshes.shape[1:])
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    of_coordinates = meshes.reshape(len(meshes), -1).T.tolist()
    for coordinate, ranks in zip(itertools.product(*map(range, mesh)), of_coordinates, strict=True):
        box = box_at(tensor, mesh, coordinate, placements)
        owners.setdefault(box, []).extend(ranks)
    for (offsets, lengths), its_owners in owners.items():
        if 0 not in lengths:  # there were too few rows for this rank
            yield Chunk(offsets, lengths, its_owners)


def box_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Sequence[object]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the shard at ``coordinate`` of a mesh.

    As torch shards: into parts of equal length, rounded up, so that the last ones may be shorter or empty; one mesh
    dimension after the other. A strided shard (FSDP2 over tensor parallelism) is cut after those that it skips.

    Raises:
        CannotSave: for a placement other than Replicate or a contiguous Shard.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for number in sorted(range(len(placements)), key=lambda number: isinstance(placements[number], _StridedShard)):
        placement = placements[number]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard) or not _is_contiguous(number, placements, mesh_shape):
            raise CannotSave(f"cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first")
        dimension = placement.dim
        length = -(-sizes[dimension] // mesh_shape[number])
        begin = min(coordinate[number] * length, sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(length, sizes[dimension] - begin)
    return tuple(offsets), tuple(sizes)


def _is_contiguous(number: int, placements: Sequence[object], mesh_shape: Sequence[int]) -> bool:
    """Whether a strided placement skips exactly the shards of the mesh dimensions after it."""
    placement = placements[number]
    if not isinstance(placement, _StridedShard):
        return True
    skipped = [
        mesh_shape[later]
        for later in range(number + 1, len(placements))
        if (other := placements[later]) and type(other) is Shard and other.dim == placement.dim
    ]
    return placement.split_factor == math.prod(skipped)


def _index(stored: dict[str, StoredTensor], files: Sequence[FilePlan], absent: Collection[str]) -> Index:
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in stored}
    for file in files:
        for chunk, span in zip(file.layout.chunks, file.layout.spans, strict=True):
            placed = StoredChunk(file.name, span, chunk.offsets, chunk.shape)
            chunks[f"{file.component}.{chunk.name}"].append(placed)
    return Index(
        {
            name: StoredTensor(each.dtype, each.shape, tuple(chunks[name]))
            for name, each in stored.items()
            if name not in absent
        },
        {name: each for name, each in stored.items() if name in absent},
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; not a copy."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.requires_grad else local
