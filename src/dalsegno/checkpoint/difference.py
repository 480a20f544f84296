"""Differences between two checkpoints, or two trees of state: bit by bit, tensor by tensor and value by value.

Memory holds one tensor of each checkpoint at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from .frozen_checksums import read_fingerprints
from .index import Index, StoredTensor
from .manifest import Checkpoint
from .sidecar import saved_states
from .tensor_files import name_of
from .tensor_reader import ChunkReader

MISSING = "(missing)"
_CHUNK = 1 << 20
"""Elements compared as float64 at once."""
_LONGEST = 60
"""Characters of a value in a text."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or another value that differs.

    Attributes:
        component: key of the component.
        path: name of the tensor, or path in the component's state; with ``[1]`` in front in the state of rank 1.
        values: value on each side, :data:`MISSING` where it has none. Of tensors: dtype and shape, and None where it is
            missing.
        is_tensor: whether two tensors were compared, or a checkpoint lacks one.
        count: of tensors, number of elements that differ, and of all; None if dtype or shape differs.
        max_abs: largest absolute difference; infinite if only one of two elements is finite.
        max_rel: largest difference relative to the larger of two elements.
    """

    component: str
    path: str
    values: tuple[Any, Any]
    is_tensor: bool = False
    count: tuple[int, int] | None = None
    max_abs: float | None = None
    max_rel: float | None = None

    @property
    def name(self) -> str:
        """Component and path."""
        return f"{self.component}{'' if self.path.startswith('[') else '.'}{self.path}"

    def __str__(self) -> str:
        if self.count is not None:
            differing, total = self.count
            return f"{self.name}: {differing:,} of {total:,} elements differ, by up to {self.max_abs:.3g}"
        one, other = (str(each or MISSING) if self.is_tensor or each is MISSING else repr(each) for each in self.values)
        return f"{self.name}: {_short(one)} and {_short(other)}"


def tensor_differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Sharded tensors (model and optimizer) that differ between two verified checkpoints."""
    pair = first, second
    indexes = [Index.of_checkpoint(each) for each in pair]
    readers = [ChunkReader(each) for each in pair]
    # Tensors that neither checkpoint contains are compared by their fingerprints.
    here, there = (read_fingerprints(each, index) for each, index in zip(pair, indexes, strict=True))
    for component in here.keys() & there.keys():
        for name in here[component].keys() & there[component].keys():
            if {*here[component][name]} != {*there[component][name]}:
                one, other = (_form(each.absent[component][name]) for each in indexes)
                yield Difference(component, name, (one, other), is_tensor=True)
    for component in {**indexes[0].tensors, **indexes[1].tensors}:
        ours, theirs = (each.of(component) for each in indexes)
        for name in {**ours, **theirs}:
            forms = _form(ours.get(name)), _form(theirs.get(name))
            if forms[0] != forms[1]:
                yield Difference(component, name, forms, is_tensor=True)
            elif not _same_bytes(first, ours[name], second, theirs[name]):
                tensors = readers[0].full_tensor(ours[name]), readers[1].full_tensor(theirs[name])
                yield from _of_tensors(component, name, *tensors)


def state_differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Differences in the states of all components between two verified checkpoints."""
    one, other = saved_states(first), saved_states(second)
    for key in {**one, **other}:
        pair = one.get(key, []), other.get(key, [])
        if max(map(len, pair)) == 1:  # not of ranks
            yield from value_differences(key, *(states[0] if states else MISSING for states in pair))
        else:
            yield from value_differences(key, *pair)


def value_differences(component: str, one: Any, other: Any, path: str = "") -> Iterator[Difference]:
    """Differences between two trees of state, in their order."""
    if one is MISSING and _is_tree(other):
        one = type(other)()
    elif other is MISSING and _is_tree(one):
        other = type(one)()
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        yield from _of_tensors(component, path, one, other)
    elif type(one) is not type(other):
        yield Difference(component, path, (one, other))
    elif isinstance(one, dict):
        for key in {**one, **other}:
            inner = f"{path}.{key}" if path else str(key)
            yield from value_differences(component, one.get(key, MISSING), other.get(key, MISSING), inner)
    elif isinstance(one, list | tuple):
        for number, pair in enumerate(zip_longest(one, other, fillvalue=MISSING)):
            yield from value_differences(component, *pair, f"{path}[{number}]")
    elif not _equal(one, other):
        yield Difference(component, path, (one, other))


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and len(value) > 0


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _form(tensor: StoredTensor | torch.Tensor | None) -> str | None:
    return None if tensor is None else f"{name_of(tensor.dtype)} {list(tensor.shape)}"


def _same_bytes(first: Checkpoint, one: StoredTensor, second: Checkpoint, other: StoredTensor) -> bool:
    """Whether the files' checksums prove equality without reading a byte."""
    chunks = list(one.chunks)
    files = ([each.manifest.files.get(chunk.file) for chunk in chunks] for each in (first, second))
    return chunks == list(other.chunks) and all(here == there is not None for here, there in zip(*files, strict=True))


def _of_tensors(component: str, path: str, one: torch.Tensor, other: torch.Tensor) -> Iterator[Difference]:
    one, other = one.detach(), other.detach()
    forms = _form(one), _form(other)
    if forms[0] != forms[1]:
        yield Difference(component, path, forms, is_tensor=True)
        return
    count, max_abs, max_rel = 0, 0.0, 0.0
    for here, there in zip(*(torch.split(each.reshape(-1), _CHUNK) for each in (one, other)), strict=True):
        differs = _bits(here).ne(_bits(there)).any(dim=1)
        if differs.any():
            count += int(differs.sum())
            distance, relative = _distances(here[differs], there[differs])
            max_abs, max_rel = max(max_abs, distance), max(max_rel, relative)
    if count:
        yield Difference(component, path, forms, True, (count, one.numel()), max_abs, max_rel)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Shape (elements, bytes per element)."""
    return tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _distances(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    wide = torch.complex128 if one.is_complex() else torch.float64
    here, there = one.to(wide), other.to(wide)
    distance, largest = (here - there).abs(), torch.maximum(here.abs(), there.abs())
    distance[distance.isnan()] = math.inf
    relative = torch.where(distance.isinf(), math.inf, distance / largest.clamp_min(torch.finfo(torch.float64).tiny))
    return float(distance.max()), float(relative.max())
