"""Differences between two checkpoints: tensor by tensor, and value by value in the other states.

Memory holds one tensor of each checkpoint at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.frozen_checksums import read_fingerprints
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.sidecar import saved_states
from dalsegno.checkpoint.tensor_files import name_of
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.stateful.component import State

CHUNK = 1 << 20
"""Elements compared as float64 at once."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs in at least one bit.

    Attributes:
        name: ``model.…``; for a tensor in a state, the component's key and the path in its state.
        forms: dtype and shape in each checkpoint; None where the tensor is missing.
        count: number of elements that differ, and of all; None if the forms differ.
        max_abs: largest absolute difference; infinite if only one of two elements is finite.
        max_rel: largest difference relative to the larger of two elements.
    """

    name: str
    forms: tuple[str | None, str | None]
    count: tuple[int, int] | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A value that differs in a state.

    Attributes:
        component: key of the component.
        path: path in the state; per-rank states have the rank in front.
        values: value in each checkpoint; :data:`MISSING` where it has none.
    """

    component: str
    path: str
    values: tuple[Any, Any]


MISSING = "(missing)"


def tensor_differences(first: Checkpoint, second: Checkpoint) -> Iterator[TensorDifference]:
    """Sharded tensors (model and optimizer) that differ between two verified checkpoints.

    Raises:
        DamagedCheckpoint: if an index has content that dalsegno cannot have written.
    """
    indexes = [Index.of_checkpoint(each) for each in (first, second)]
    readers = [ChunkReader(each) for each in (first, second)]
    yield from _base_differences(*zip((first, second), indexes, strict=True))
    one, other = (each.tensors for each in indexes)
    for name in {**one, **other}:
        forms = (_stored_form(one.get(name)), _stored_form(other.get(name)))
        if forms[0] != forms[1]:
            yield TensorDifference(name, forms)
        elif not _same_bytes(first, one[name], second, other[name]):
            pair = readers[0].full_tensor(one[name]), readers[1].full_tensor(other[name])
            if found := _difference(name, *pair):
                yield found


def _base_differences(one: tuple[Checkpoint, Index], other: tuple[Checkpoint, Index]) -> Iterator[TensorDifference]:
    """Tensors that neither checkpoint contains, and whose fingerprints differ."""
    here, there = (read_fingerprints(checkpoint, index) for checkpoint, index in (one, other))
    for name in here.keys() & there.keys():
        if {*here[name]} != {*there[name]}:
            forms = (_stored_form(one[1].absent[name]), _stored_form(other[1].absent[name]))
            yield TensorDifference(name, forms)


def state_differences(first: Checkpoint, second: Checkpoint) -> Iterator[StateDifference | TensorDifference]:
    """Differences in the states of all components between two verified checkpoints.

    Raises:
        DamagedCheckpoint: if a sidecar has content that dalsegno cannot have written.
    """
    one, other = saved_states(first), saved_states(second)
    for key in {**one, **other}:
        here, there = _leaves_of(one.get(key, [])), _leaves_of(other.get(key, []))
        for path in {**here, **there}:
            yield from _leaf_differences(key, path, here.get(path, MISSING), there.get(path, MISSING))


def _leaf_differences(key: str, path: str, one: Any, other: Any) -> Iterator[StateDifference | TensorDifference]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if found := _difference(f"{key}: {path}", one, other):
            yield found
    elif type(one) is not type(other) or not _equal(one, other):
        yield StateDifference(key, path, (one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _leaves_of(states: Sequence[State]) -> dict[str, Any]:
    if len(states) == 1:
        return dict(_leaves(states[0], ""))
    return {path: leaf for rank, state in enumerate(states) for path, leaf in _leaves(state, f"rank {rank}: ")}


def _leaves(state: State, path: str) -> Iterator[tuple[str, Any]]:
    """Empty containers are leaves."""
    if isinstance(state, dict) and state:
        for key, value in state.items():
            inner = key if not path or path.endswith(": ") else f".{key}"
            yield from _leaves(value, f"{path}{inner}")
    elif isinstance(state, list | tuple) and state and not isinstance(state, torch.Size):
        for number, value in enumerate(state):
            yield from _leaves(value, f"{path}[{number}]")
    else:
        yield path, state


def _stored_form(stored: StoredTensor | None) -> str | None:
    return None if stored is None else _form(stored.dtype, stored.shape)


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{name_of(dtype)} {list(shape)}"


def _same_bytes(first: Checkpoint, one: StoredTensor, second: Checkpoint, other: StoredTensor) -> bool:
    """Whether the files' checksums prove equality without reading a byte."""
    chunks = list(one.chunks)
    files = ([each.manifest.files.get(chunk.file) for chunk in chunks] for each in (first, second))
    return chunks == list(other.chunks) and all(here == there is not None for here, there in zip(*files, strict=True))


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
    forms = (_form(one.dtype, one.shape), _form(other.dtype, other.shape))
    if forms[0] != forms[1]:
        return TensorDifference(name, forms)
    count, max_abs, max_rel = 0, 0.0, 0.0
    for here, there in zip(*(torch.split(each.reshape(-1), CHUNK) for each in (one, other)), strict=True):
        differs = _bits(here).ne(_bits(there)).any(dim=1)
        if differs.any():
            count += int(differs.sum())
            distance, relative = _distances(here[differs], there[differs])
            max_abs, max_rel = max(max_abs, distance), max(max_rel, relative)
    return TensorDifference(name, forms, (count, one.numel()), max_abs, max_rel) if count else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Shape (elements, bytes per element)."""
    return tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), -1)


def _distances(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    wide = torch.complex128 if one.is_complex() else torch.float64
    here, there = one.to(wide), other.to(wide)
    distance, largest = (here - there).abs(), torch.maximum(here.abs(), there.abs())
    distance[distance.isnan()] = math.inf
    relative = torch.where(distance.isinf(), math.inf, distance / largest.clamp_min(torch.finfo(torch.float64).tiny))
    return float(distance.max()), float(relative.max())
