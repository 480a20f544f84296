"""Digests of samples, states and other plain values; and of batches, for a running digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor


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


def batch_digest(value: Any) -> str:
    """Hash what :func:`add_batch` reads of a batch, or of a state."""
    hashed = xxhash.xxh3_64()
    add_batch(hashed, value)
    return hashed.hexdigest()


LARGE = 524_288
"""Bytes of a tensor that are read at most; of a larger one so many in pieces, spread evenly."""

PIECES = 1024

_DEPTH = 6
_NUMPY_HAS = {
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")
}


def add_batch(
    hashed: xxhash.xxh3_64, value: Any, depth: int = 0, *, on_device: list[torch.Tensor] | None = None
) -> None:
    """Add the contents of a batch, or of a part of it.

    Of tensors on a device only the shape is read, since their values would have to be waited for; those that are not
    empty are appended to ``on_device``. Of objects of a type that is neither a container nor has attributes, only the
    type is.
    """
    if isinstance(value, torch.Tensor):
        _add_tensor(hashed, value, on_device)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:  # of objects, the bytes would be addresses
        _add_array(hashed, value)
    elif isinstance(value, str):
        hashed.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        hashed.update(value)
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        hashed.update(repr(value).encode())
    elif depth == _DEPTH:
        hashed.update(type(value).__qualname__.encode())
    elif isinstance(value, dict | Mapping):  # dict first: Mapping takes 1 µs
        for key, item in value.items():
            add_batch(hashed, key, depth + 1, on_device=on_device)
            add_batch(hashed, item, depth + 1, on_device=on_device)
    elif isinstance(value, list | tuple | np.ndarray):
        hashed.update(b"[%d" % len(value))
        for item in value:
            add_batch(hashed, item, depth + 1, on_device=on_device)
    else:
        hashed.update(type(value).__qualname__.encode())
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            add_batch(hashed, {name: attributes[name] for name in sorted(attributes)}, depth + 1, on_device=on_device)


def _add_tensor(hashed: xxhash.xxh3_64, tensor: torch.Tensor, on_device: list[torch.Tensor] | None) -> None:
    is_plain = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if not is_plain or tensor.device.type != "cpu" or isinstance(tensor, DTensor):
        hashed.update(str(tensor.dtype if tensor.is_nested else (tensor.dtype, tuple(tensor.shape))).encode())
        is_readable = is_plain and tensor.device.type not in ("cpu", "meta") and not isinstance(tensor, DTensor)
        if on_device is not None and is_readable and tensor.numel():
            on_device.append(tensor)
        return
    if tensor.dtype not in _NUMPY_HAS:  # bfloat16, float8
        tensor = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    _add_array(hashed, tensor.numpy(force=True))


def _add_array(hashed: xxhash.xxh3_64, array: np.ndarray[Any, Any]) -> None:
    hashed.update(f"{array.dtype.char}{array.shape}".encode())
    if array.nbytes > LARGE:
        content = array.ravel(order="K").view(np.uint8)
        array = content[: content.size // PIECES * PIECES].reshape(PIECES, -1)[:, : LARGE // PIECES]
    if array.nbytes:
        buffer: Any = np.ascontiguousarray(array)  # NumPy's types do not show that before Python 3.12
        hashed.update(buffer)
