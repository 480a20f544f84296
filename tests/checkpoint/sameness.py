"""Equality of two states: type by type, key by key, in order, bit by bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        assert list(one) == list(other) and [type(key) for key in one] == [type(key) for key in other], where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(one, float) and not isinstance(one, np.generic):
        assert struct.pack(">d", one) == struct.pack(">d", other), where
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other), where
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes(), where
    else:
        assert one == other, where
