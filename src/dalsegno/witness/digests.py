"""Digests of what goes into a step: batches, and the states of random generators. Nothing waits for a device."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dalsegno.distributed import accelerator

ELEMENTS = 65_536
"""Elements of a tensor that are read; of a larger one as many of each row, spread evenly."""

_DEPTH = 6


def batch_digest(batches: Iterable[Any]) -> str:
    """Digest of the contents of ``batches``, 16 hex digits.

    Of tensors on a device only dtype and shape are read, since their values would have to be waited for; of objects of
    a type that is neither a container nor has attributes, only the type.
    """
    hashed = xxhash.xxh3_64()
    for batch in batches:
        _add(hashed, batch, 0)
    return hashed.hexdigest()


def generator_digests() -> str:
    """Digests of the states of :data:`GENERATORS`, those that this process has, separated by spaces."""
    version, numbers, gauss = random.getstate()
    digests = [
        xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().data),
        xxhash.xxh3_64_hexdigest(_numpy_state()),
        f"{hash((version, numbers, gauss or 0.0)) & _WORD:016x}",  # of numbers: equal in every process
    ]
    device = accelerator.generator_state()
    return " ".join(digests if device is None else [*digests, xxhash.xxh3_64_hexdigest(device.numpy().data)])


GENERATORS = ("torch's", "NumPy's", "Python's", "the accelerator's")
"""Whose generators :func:`generator_digests` reads, in this order."""

_WORD = 0xFFFFFFFFFFFFFFFF
_MERSENNE_TWISTER = 625 * 4
"""Bytes of NumPy's struct: 624 numbers and the place among them."""


def _numpy_state() -> bytes:
    """State of NumPy's global generator; reading it where it is takes 1 µs, and ``np.random.get_state`` 35."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is np.random.MT19937:
        return ctypes.string_at(bits.ctypes.state_address, _MERSENNE_TWISTER)
    return repr(bits.state).encode()


def _add(hashed: xxhash.xxh3_64, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(hashed, value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        hashed.update(f"{value.dtype}{value.shape}".encode())
        hashed.update(np.ascontiguousarray(_thinned(value)).view(np.uint8).reshape(-1).data)
    elif isinstance(value, str):
        hashed.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        hashed.update(value)
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        hashed.update(repr(value).encode())
    elif depth == _DEPTH:
        hashed.update(type(value).__qualname__.encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(hashed, key, depth + 1)
            _add(hashed, item, depth + 1)
    elif isinstance(value, list | tuple):
        hashed.update(b"[%d" % len(value))
        for item in value:
            _add(hashed, item, depth + 1)
    else:
        hashed.update(type(value).__qualname__.encode())
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            _add(hashed, {name: attributes[name] for name in sorted(attributes)}, depth + 1)


def _add_tensor(hashed: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    hashed.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.device.type != "cpu" or isinstance(tensor, DTensor) or not tensor.numel():
        return
    tensor = tensor.detach() if tensor.numel() <= ELEMENTS else _thinned(tensor.detach())
    try:
        hashed.update(tensor.contiguous().numpy().data)
    except (TypeError, RuntimeError):  # a dtype that NumPy does not have, or a tensor that is not strided
        if tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
            hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _thinned(array: Any) -> Any:
    """The tensor or array itself, or some elements of each of its rows."""
    size = array.numel() if isinstance(array, torch.Tensor) else array.size
    if size <= ELEMENTS:
        return array
    rows = array.shape[0]
    flat = array.reshape(rows, -1)
    columns = max(1, ELEMENTS // rows)
    return flat[:: max(1, rows // ELEMENTS), :: max(1, flat.shape[1] // columns)]
