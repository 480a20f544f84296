"""Plan which rank writes which part of the sharded tensors.

Each rank computes the plan of all ranks from what all know alike: names, dtypes, shapes and placements of the tensors.
So nothing is gathered, at any number of ranks, and all ranks get the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dalsegno.checkpoint import index, names
from dalsegno.checkpoint.contract import FrozenNames, Shardings, TensorsByComponent, describe_uneven, sharding_of
from dalsegno.checkpoint.sharding import Box, Integers, Sharding
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk, name_of
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import local_part
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file that this rank writes, with tensors of one ``component``: frozen ones, or those that training changes."""

    name: str
    component: str
    is_frozen: bool
    layout: FileLayout

    def tensors(self, of: TensorsByComponent) -> list[torch.Tensor]:
        """This rank's shards in the order of the layout; not copies. Read them under ``torch.no_grad()``."""
        component = of[self.component]
        with torch.no_grad():
            return [local_part(component[chunk.name]) for chunk in self.layout.chunks]


@dataclass(frozen=True, slots=True)
class Plan:
    """Files that this rank writes: of each component, one of frozen tensors and one of the others; on rank 0, the
    index."""

    files: Sequence[FilePlan]
    absent: Mapping[str, Sequence[TensorChunk]]
    """By component, the chunks that are not saved and whose checksums this rank writes."""
    index: bytes | None


def plan(tensors: TensorsByComponent, frozen: FrozenNames, absent: FrozenNames) -> Plan:
    """Assign each tensor's boxes to the ranks that write them; one replica of them all, that with the least to write.
    Takes microseconds per tensor, at any number of ranks. Callers keep a plan as long as :func:`signature` is unchanged
    on all ranks. ``frozen``: names of those in files of their own; ``absent``: of those that are not saved."""
    rank, ranks = collectives.rank(), collectives.world_size()
    whole = {False: 0, True: 0}  # apart: frozen tensors stay where they are when an optimizer gets its state
    for component, its in tensors.items():
        for name, tensor in its.items():
            whole[name in frozen.get(component, ())] += math.prod(tensor.shape) * tensor.dtype.itemsize
    balances = {is_frozen: Balance(ranks, of_all) for is_frozen, of_all in whole.items()}
    numbers: dict[Sharding, int] = {}  # this and the following two on rank 0 alone, which writes the index
    saved: dict[str, index.TensorEntry] = {}
    omitted: dict[str, index.FormEntry] = {}
    files: list[FilePlan] = []
    unsaved: dict[str, list[TensorChunk]] = {}
    shardings = Shardings()
    for component, its in tensors.items():
        chunks: dict[bool, list[TensorChunk]] = {}
        for name, tensor in its.items():
            dtype, shape, sharding = tensor.dtype, tuple(tensor.shape), shardings.of(tensor)
            is_frozen = name in frozen.get(component, ())
            is_absent = name in absent.get(component, ())
            boxes = ShardLayout.of(sharding, shape, rank)
            replica = balances[is_frozen].assign(boxes, dtype.itemsize)
            if (box := boxes.here.get(replica)) is not None:
                if uneven := describe_uneven(tensor, box):  # it would be copied over its neighbours
                    raise CannotSave(f"cannot save {component}.{name}: {uneven}")
                own = unsaved.setdefault(component, []) if is_absent else chunks.setdefault(is_frozen, [])
                own.append(TensorChunk(name, dtype, box.shape, box.offsets, shape))
            if rank != 0:
                continue
            if is_absent:
                omitted[f"{component}.{name}"] = {"dtype": name_of(dtype), "shape": list(shape)}
                continue
            number = numbers.setdefault(sharding, len(numbers))
            entry: index.TensorEntry = {"dtype": name_of(dtype), "shape": list(shape), "sharding": number}
            if replica:
                entry["replica"] = replica
            if is_frozen:
                entry["frozen"] = True
            saved[f"{component}.{name}"] = entry
        for is_frozen, of_file in sorted(chunks.items()):
            file = names.shard(component, rank, is_frozen=is_frozen)
            files.append(FilePlan(file, component, is_frozen, FileLayout.of(of_file)))
    return Plan(files, unsaved, index.to_bytes(numbers, saved, omitted) if rank == 0 else None)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A tensor's boxes on the ranks: the ``owners`` of those that are not empty, as of the sharding, and their
    ``elements``; and by replica, the box ``here``."""

    owners: Integers
    elements: Integers
    here: Mapping[int, Box]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, sharding: Sharding, shape: tuple[int, ...], rank: int) -> ShardLayout:
        boxes, owners = sharding.boxes(shape), sharding.owners
        elements = boxes.sizes.prod(axis=1)
        here = {
            replica: boxes[number]
            for number, replica in np.argwhere(owners == rank).tolist()
            if elements[number] or not sharding.cuts  # there may be too few rows for this rank
        }
        return cls(owners[elements > 0], elements[elements > 0], here)


class Balance:
    """Bytes that each of ``ranks`` has to write, of the tensors planned so far; ``whole``: of all that it balances."""

    def __init__(self, ranks: int, whole: int) -> None:
        self._loads = np.zeros(ranks, np.int64)
        # Compared in such units, small replicated tensors do not go to a rank each: whoever reads them would have to
        # open every file.
        self._unit = max(1, whole // (64 * ranks))

    def assign(self, boxes: ShardLayout, itemsize: int) -> int:
        owners = boxes.owners
        replica = 0
        if owners.shape[1] > 1 and len(owners):
            replica = int((self._loads[owners].max(axis=0) // self._unit).argmin())
        self._loads[owners[:, replica]] += boxes.elements * itemsize
        return replica


def signature(tensors: TensorsByComponent, frozen: FrozenNames) -> object:
    """Equal for tensors that have the same plan."""
    return (
        collectives.world_size(),
        {component: frozenset(names) for component, names in frozen.items()},
        [
            (
                component,
                list(its),
                *_forms(its.values()),
                [(name, each.placements, each.device_mesh) for name, each in its.items() if type(each) is DTensor],
                [
                    (name, place.meshes, place.placements)
                    for name, each in its.items()
                    if (place := place_of(each)) is not None
                ],
            )
            for component, its in tensors.items()
        ],
    )


def _forms(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.dtype], list[int]]:
    """Dtypes, and dimensions with their sizes; no object for each of thousands of tensors, which cost a collection."""
    dtypes, sizes = [], []
    for tensor in tensors:
        shape = tensor.shape
        dtypes.append(tensor.dtype)
        sizes.append(len(shape))
        sizes += shape
    return dtypes, sizes


def plan_on_all_ranks(tensors: TensorsByComponent, frozen: FrozenNames, absent: FrozenNames) -> Plan:
    """As :func:`plan`. Raises CannotSave, with the first difference, on every rank unless all ranks hold the same
    tensors. Collective: one small exchange."""
    planned, are_equal = collectives.run_and_compare(
        lambda: plan(tensors, frozen, absent), lambda _: _lines(tensors, frozen)
    )
    if are_equal:
        return planned
    of_zero, *others = collectives.gather(_lines(tensors, frozen), "what each rank holds")
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


def _lines(tensors: TensorsByComponent, frozen: FrozenNames) -> list[str]:
    return [
        f"{component}.{_described(name, tensor)}{' frozen' if name in frozen.get(component, ()) else ''}"
        for component, its in tensors.items()
        for name, tensor in its.items()
    ]


def _described(name: str, tensor: torch.Tensor) -> str:
    sharding = sharding_of(tensor)
    placement = f" {sharding.cuts} {sharding.mesh} {sharding.ranks}" if sharding.cuts else ""
    return f"{name} {list(tensor.shape)} {tensor.dtype}{placement}"
