"""How tensors and arrays lie in memory: their strides, and which of them overlap.

A file has the elements in order. Strides change how an operation rounds, so unusual ones are recorded, and a load lays
the elements out again. Of values that overlap, a file has the common memory once, as bytes, and each value is a view of
it: what changes one in place changes all, as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Value = torch.Tensor | Array

_WIDEST = 16  # bytes of an element; common memory is a multiple, so that it can be viewed as any dtype
_FARTHEST = 1 << 48


def strides_of(value: Value) -> tuple[int, ...]:
    """In elements of a tensor, in bytes of an array."""
    return value.stride() if isinstance(value, torch.Tensor) else value.strides


def unusual_strides(value: Value) -> list[int] | None:
    """As :func:`strides_of`; None if the elements follow each other in order."""
    is_contiguous = value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous
    if is_contiguous and 1 not in value.shape:  # where the size is 1, any stride is one
        return None
    strides, step = strides_of(value), 1 if isinstance(value, torch.Tensor) else value.itemsize
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        if stride != step:
            return list(strides) if 0 not in value.shape else None
        step *= size
    return None


def are_strides(strides: object, shape: Sequence[int]) -> bool:
    """Whether ``strides``, possibly read from disk, have one for each dimension, on which no arithmetic overflows."""
    return (
        isinstance(strides, list)
        and len(strides) == len(shape)
        and all(type(stride) is int and abs(stride) < _FARTHEST for stride in strides)
    )


def tensor_with(strides: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` with these strides."""
    copy = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    _fill(copy, values)
    return copy


def array_with(strides: Sequence[int], values: Array) -> Array:
    """A copy of ``values`` with these strides."""
    before, after = _reach(values.shape, strides)
    memory = torch.empty(after - before + values.itemsize, dtype=torch.uint8)
    copy = array_in(memory, -before, values.dtype, values.shape, strides)
    copy[...] = values
    return copy


def tensor_in(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """The tensor whose first element is at byte ``offset`` of ``memory``."""
    return memory.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)


def array_in(
    memory: torch.Tensor, offset: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int]
) -> Array:
    """The array whose first element is at byte ``offset`` of ``memory``."""
    return np.ndarray(tuple(shape), dtype, memory.numpy().data, offset, tuple(strides))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Values that share memory.

    Attributes:
        numbers: of the values.
        offsets: of the first element of each, in bytes from the first byte that belongs to any.
        memory: a copy; bytes that belong to none are zero.
    """

    numbers: Sequence[int]
    offsets: Sequence[int]
    memory: torch.Tensor


def overlaps(values: Sequence[Value]) -> Iterator[Overlap]:
    """Values that share memory, except those that have more bytes between them than they have themselves, such as two
    columns of a wide table: they seldom have a common element, and the table may be large."""
    begins, ends = np.array([_addresses(value) for value in values], np.int64).reshape(-1, 2).T
    order = begins.argsort()
    if not (np.maximum.accumulate(ends[order])[:-1] > begins[order][1:]).any():  # the usual case, of thousands
        return
    places = sorted(zip(begins.tolist(), ends.tolist(), range(len(values)), strict=True))
    run: list[int] = []
    first, last = 0, 0
    for begin, end, number in [*places, (sys.maxsize, sys.maxsize, -1)]:
        if begin >= last:
            if len(run) > 1 and (found := _overlap([values[each] for each in run], run, first, last)):
                yield found
            run, first = [], begin
        if begin < end:
            run.append(number)
            last = max(last, end)


def _overlap(values: Sequence[Value], numbers: Sequence[int], begin: int, end: int) -> Overlap | None:
    offsets = [_address(value) - begin for value in values]
    devices = {value.device if isinstance(value, torch.Tensor) else torch.device("cpu") for value in values}
    if (
        end - begin > sum(value.nbytes for value in values)
        or len(devices) > 1
        or any(offset % value.itemsize for offset, value in zip(offsets, values, strict=True))
        or any(isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()) for value in values)
    ):
        return None
    memory = torch.zeros(-(-(end - begin) // _WIDEST) * _WIDEST, dtype=torch.uint8, device=devices.pop())
    for value, offset in zip(values, offsets, strict=True):
        if isinstance(value, torch.Tensor):
            _fill(tensor_in(memory, offset, value.dtype, value.shape, value.stride()), value)
        else:
            array_in(memory, offset, value.dtype, value.shape, value.strides)[...] = value
    return Overlap(numbers, offsets, memory)


def _addresses(value: Value) -> tuple[int, int]:
    """Of the first byte, and after the last."""
    if isinstance(value, torch.Tensor) and value.is_contiguous():  # faster, with thousands of them
        at = value.data_ptr()
        return at, at + value.nbytes
    at = _address(value)
    width = value.itemsize if isinstance(value, torch.Tensor) else 1
    before, after = _reach(value.shape, strides_of(value))
    return at + before * width, at + after * width + value.itemsize


def _address(value: Value) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def _reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Positions of the first and the last element in memory, from that of the one at index 0."""
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


@torch.no_grad()
def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``tensor``, which may be expanded."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
