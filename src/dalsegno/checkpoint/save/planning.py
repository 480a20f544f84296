"""Who writes what of the tensors that are spread over the ranks.

Each rank works it out for itself, for all of them, from what all know alike: a tensor's name, type and shape, and how
it is spread. So nothing is gathered, however many ranks there are, and all come to the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dalsegno.checkpoint.format.index import Index, StoredPiece, StoredTensor
from dalsegno.checkpoint.format.layout import FileLayout, TensorChunk
from dalsegno.distributed import collectives
from dalsegno.errors import CannotSave

Tensors = dict[str, dict[str, torch.Tensor]]
"""By component and name; DTensors for what is spread over the ranks."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file of one rank: where its tensors lie. ``component`` is whose they are; all of them are of one."""

    name: str
    component: str
    layout: FileLayout

    def tensors(self, of: Tensors) -> list[torch.Tensor]:
        """This rank's parts, in the order of the layout. Not copies."""
        its = of[self.component]
        return [_part(its[piece.name]) for piece in self.layout.pieces]


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank writes: a file for each component it has a part of; on rank 0, the index over all ranks' files."""

    files: Sequence[FilePlan]
    index: bytes | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the ranks that have it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    owners: Sequence[int]


class ShardLayout:
    """How a tensor lies over the ranks.

    Attributes:
        boxes: its parts.
        elements: of each rank, if no part is on several, else None.
    """

    def __init__(self, boxes: Sequence[Chunk]) -> None:
        self.boxes = boxes
        self._of_rank = {box.owners[0]: box for box in boxes}
        self.elements: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if all(len(box.owners) == 1 for box in boxes):
            self.elements = np.zeros(collectives.world_size(), np.int64)
            for rank, box in self._of_rank.items():
                self.elements[rank] = math.prod(box.shape)

    def assign_writers(
        self, loads: np.ndarray[Any, np.dtype[np.int64]], size: int, rank: int
    ) -> Iterator[tuple[int, Chunk]]:
        """Who writes what of a tensor with elements of ``size`` bytes; ``loads``, bytes of each rank, grow by that.

        Only what concerns ``rank``, which is everything for rank 0.
        """
        if self.elements is not None:
            loads += self.elements * size
            if rank:
                yield from ((rank, box) for box in [self._of_rank.get(rank)] if box is not None)
            else:
                yield from self._of_rank.items()
            return
        for box in self.boxes:
            writer = box.owners[int(loads[box.owners].argmin())]
            loads[writer] += math.prod(box.shape) * size
            if rank in (0, writer):
                yield writer, box


def plan(tensors: Tensors) -> Plan:
    """Share ``tensors`` among the ranks; what several have is written once, by the one with the least to do.

    Takes microseconds for each tensor, on rank 0 for each of each rank: so a plan is kept for as long as
    :func:`signature` stays the same on all ranks.

    Raises:
        CannotSave: for a tensor whose parts are yet to be summed up.
    """
    rank, loads = collectives.rank(), np.zeros(collectives.world_size(), np.int64)
    files: list[FilePlan] = []
    stored: dict[str, StoredTensor] = {}
    known: dict[object, ShardLayout] = {}
    for component, its in tensors.items():
        pieces: dict[int, list[TensorChunk]] = {}
        for name, tensor in its.items():
            dtype, shape = tensor.dtype, tuple(tensor.shape)
            stored[f"{component}.{name}"] = StoredTensor(dtype, shape, ())
            for writer, box in _spread(tensor, known).assign_writers(loads, dtype.itemsize, rank):
                pieces.setdefault(writer, []).append(TensorChunk(name, dtype, box.shape, box.offsets, shape))
        files += [
            FilePlan(f"{component}/shard-{writer:05d}.safetensors", component, FileLayout.of(its_pieces))
            for writer, its_pieces in sorted(pieces.items())
        ]
    own = f"/shard-{rank:05d}.safetensors"
    index = _index(stored, files).to_bytes() if rank == 0 else None
    return Plan([file for file in files if file.name.endswith(own)], index)


def signature(tensors: Tensors) -> object:
    """Equal for tensors that are laid out and shared alike."""
    return (
        collectives.world_size(),
        [
            (
                component,
                list(its),
                [tensor.dtype for tensor in its.values()],
                [tensor.shape for tensor in its.values()],
                [(tensor.placements, tensor.device_mesh) for tensor in its.values() if type(tensor) is DTensor],
            )
            for component, its in tensors.items()
        ],
    )


def check_ranks_match(tensors: Tensors) -> None:
    """Make sure that all ranks hold the same ones. Collective: one small reduction.

    Raises:
        CannotSave: on every rank, if they do not; names the first that differs.
    """
    told = [f"{component}.{line}" for component, its in tensors.items() for line in map(_told, its, its.values())]
    digest = xxhash.xxh3_64_intdigest("\n".join(told).encode("utf-8", "surrogatepass")) >> 1
    highest, lowest = collectives.all_reduce_max([digest, -digest], "what all ranks hold")
    if highest == -lowest:
        return
    of_zero, *others = collectives.gather(told, "what each rank holds")
    number, here, there = next(
        (number, here, there)
        for number, theirs in enumerate(others, start=1)
        for here, there in itertools.zip_longest(of_zero, theirs, fillvalue="nothing more")
        if here != there
    )
    raise CannotSave(
        f"the ranks hold different tensors: rank 0 has {here}, where rank {number} has {there}. All need the same "
        "ones; what is spread over the ranks must be a DTensor"
    )


def _told(name: str, tensor: torch.Tensor) -> str:
    spread = f" {tensor.placements} {tensor.device_mesh.mesh.tolist()}" if isinstance(tensor, DTensor) else ""
    return f"{name} {list(tensor.shape)} {tensor.dtype}{spread}"


def _spread(tensor: torch.Tensor, known: dict[object, ShardLayout]) -> ShardLayout:
    """``known`` are those of other tensors, since many are spread alike."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        if shape not in known:
            known[shape] = ShardLayout([Chunk((0,) * len(shape), shape, range(collectives.world_size()))])
        return known[shape]
    key = (shape, tensor.placements, tensor.device_mesh)
    if key not in known:
        known[key] = ShardLayout(list(_boxes(tensor)))
    return known[key]


def _boxes(tensor: DTensor) -> Iterator[Chunk]:
    mesh = tensor.device_mesh.mesh
    owners: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        box = box_at(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)
        owners.setdefault(box, []).append(int(mesh[coordinate]))
    for (offsets, shape), its_owners in owners.items():
        if 0 not in shape:  # a rank that got none, since there were too few rows
            yield Chunk(offsets, shape, its_owners)


def box_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Sequence[object]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the part that lies at ``coordinate`` of a mesh.

    As torch cuts: into pieces of the same length, rounded up, so that the last ones may be shorter or empty; one mesh
    dimension after the other. One with strides (FSDP2 over tensor parallelism) is cut after those that it skips.

    Raises:
        CannotSave: for a placement that is no replica, and no shard in one piece.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for number in sorted(range(len(placements)), key=lambda number: isinstance(placements[number], _StridedShard)):
        placement = placements[number]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard) or not _is_in_one_piece(number, placements, mesh_shape):
            raise CannotSave(f"cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first")
        dimension = placement.dim
        length = -(-sizes[dimension] // mesh_shape[number])
        begin = min(coordinate[number] * length, sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(length, sizes[dimension] - begin)
    return tuple(offsets), tuple(sizes)


def _is_in_one_piece(number: int, placements: Sequence[object], mesh_shape: Sequence[int]) -> bool:
    """Whether a placement with strides skips just the shards of the mesh dimensions after it."""
    placement = placements[number]
    if not isinstance(placement, _StridedShard):
        return True
    skipped = [
        mesh_shape[later]
        for later in range(number + 1, len(placements))
        if (other := placements[later]) and type(other) is Shard and other.dim == placement.dim
    ]
    return placement.split_factor == math.prod(skipped)


def _index(stored: dict[str, StoredTensor], files: Sequence[FilePlan]) -> Index:
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in stored}
    for file in files:
        for piece, span in zip(file.layout.pieces, file.layout.spans, strict=True):
            placed = StoredPiece(file.name, span, piece.offsets, piece.shape)
            pieces[f"{file.component}.{piece.name}"].append(placed)
    return Index({name: StoredTensor(each.dtype, each.shape, tuple(pieces[name])) for name, each in stored.items()})


def _part(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach() if part.requires_grad else part
