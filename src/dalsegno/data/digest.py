"""Digests of samples, states and other plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash


def digest(value: Any) -> str:
    """Hash a state, or other plain values, arrays and tensors. Equal values have equal digests."""
    hashed = xxhash.xxh3_128()
    for part in parts_of(value):
        hashed.update(part.tobytes() if isinstance(part, np.ndarray) else part)
    return hashed.hexdigest()


def parts_of(value: Any, depth: int = 0) -> Iterator[bytes | np.ndarray]:
    """Yield a sample's contents: floats as arrays, all else as bytes; for an unknown type, its name."""
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        value = value.to(torch.float64).numpy() if value.is_floating_point() else value.contiguous().view(-1).numpy()
    if isinstance(value, float | np.floating):
        value = np.asarray(float(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()  # its bytes would be addresses
    if isinstance(value, np.ndarray):
        yield str(value.shape).encode()
        yield value if value.dtype.kind == "f" else value.tobytes()
    elif isinstance(value, str | bytes | bytearray):
        yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    elif isinstance(value, bool | int | complex | np.generic) or value is None:
        yield str(value).encode()
    elif isinstance(value, Mapping | Sequence) and depth < 10:
        items = [each for item in value.items() for each in item] if isinstance(value, Mapping) else value
        if {*map(type, items)} == {int}:  # the same bytes at once: random generators have 600 numbers
            yield f"int{'int'.join(map(str, items))}".encode()
            return
        for each in items:
            yield from parts_of(each, depth + 1)
    elif callable(to_bytes := getattr(value, "tobytes", None)):  # an image
        yield to_bytes()
