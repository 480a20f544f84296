"""Sameness: whether two objects that were built alike are equal, attribute by attribute."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.codec import encode


def same(one: Any, other: Any, _seen: frozenset[int] = frozenset()) -> bool:
    """Whether both contain equal values.

    What only a constructor can make (locks, files) counts as equal if it is of the same type.
    """
    if one is other or id(one) in _seen:
        return True
    if type(one) is not type(other):
        return False
    seen = _seen | {id(one)}
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (bool, int, float, complex, str, bytes, set, frozenset, type)):
        return one == other or (one != one and other != other)  # NaN
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(*pair, seen) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], seen) for key in one)
    if isinstance(one, types.FunctionType):
        return one.__code__ is other.__code__
    if isinstance(one, types.MethodType):
        return same(one.__func__, other.__func__, seen)
    return same(vars(one), vars(other), seen) if hasattr(one, "__dict__") else True


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are saved as the same bytes."""
    (json, arrays), (other_json, other_arrays) = encode(one, "state"), encode(other, "state")
    return bool(json == other_json) and same(arrays, other_arrays)
