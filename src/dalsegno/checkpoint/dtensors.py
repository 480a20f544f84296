"""The sharding of a tensor: from its DTensor, from its place in a pipeline, or replicated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dalsegno.checkpoint.sharding import Box, Sharding
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import meshes_like
from dalsegno.distributed.sharded_tensors import local_part
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave, StateMismatch


class Shardings:
    """Shardings of tensors, each computed once, since many tensors are sharded alike."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}

    def of(self, tensor: torch.Tensor) -> Sharding:
        key: object = None
        if (place := place_of(tensor)) is not None:
            key = (place.meshes, place.placements)
        elif isinstance(tensor, DTensor):
            key = (tensor.device_mesh, tensor.placements)
        if key not in self._known:
            self._known[key] = sharding_of(tensor)
        return self._known[key]


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Equal on all ranks."""
    if (place := place_of(tensor)) is not None:
        ranks, (_, *mesh) = place.meshes
        return Sharding(tuple(ranks), tuple(mesh), cuts_of(place.placements, mesh))
    if isinstance(tensor, DTensor):
        meshes = meshes_like(tensor.device_mesh)
        mesh = list(meshes.shape[1:])
        return Sharding(tuple(meshes.flatten().tolist()), tuple(mesh), cuts_of(tensor.placements, mesh))
    return Sharding.replicated(collectives.world_size())


def box_here(tensor: torch.Tensor, name: str) -> Box | None:
    """The part of ``tensor`` that this rank holds; None if its mesh is of other ranks. ``name``: for errors."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    cuts = cuts_of(tensor.placements, mesh.shape)
    if coordinate is None:
        return None
    box = Sharding((), tuple(mesh.shape), cuts).box_at(shape, coordinate)
    if uneven := describe_uneven(tensor, box):
        raise StateMismatch(f"cannot load {name}: {uneven}")
    return box


def describe_uneven(tensor: torch.Tensor, box: Box) -> str:
    """How this rank's part of ``tensor`` differs from ``box``, the one by its placements; empty if it does not.
    ``DTensor.from_local`` takes parts of any size, and no rank alone knows where they begin."""
    held = tuple(local_part(tensor).shape)
    if held == box.shape:
        return ""
    return (
        f"of its shape {list(tensor.shape)}, rank {collectives.rank()} holds {list(held)}, and torch's even shards "
        f"would be {list(box.shape)} here; redistribute it, or build it with distribute_tensor"
    )


def cuts_of(placements: Sequence[object], mesh: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The cuts of a :class:`Sharding`. A strided shard (FSDP2 over tensor parallelism) comes after those that it
    skips."""
    cuts = []
    for number in sorted(range(len(placements)), key=lambda number: isinstance(placements[number], _StridedShard)):
        placement = placements[number]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard) or not _is_contiguous(number, placements, mesh):
            raise CannotSave(f"cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first")
        cuts.append((number, placement.dim))
    return tuple(cuts)


def _is_contiguous(number: int, placements: Sequence[object], mesh: Sequence[int]) -> bool:
    """Whether a strided placement skips exactly the shards of the mesh dimensions after it."""
    placement = placements[number]
    if not isinstance(placement, _StridedShard):
        return True
    skipped = [
        mesh[later]
        for later in range(number + 1, len(placements))
        if (other := placements[later]) and type(other) is Shard and other.dim == placement.dim
    ]
    return placement.split_factor == math.prod(skipped)
