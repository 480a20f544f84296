"""Wrapped tensors: subclasses, such as quantized weights, whose data are other tensors (``__tensor_flatten__``)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a tensor on this rank: itself, or those that it wraps."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(tensor, name))


def holds_numbers(tensor: Tensor) -> bool:
    """Whether the elements are numbers to calculate with; not if they are quantized: integers, float8 or wrapped."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (tensor.is_floating_point() or tensor.is_complex()) and (
        tensor.dtype.itemsize > 1 and not hasattr(local, "__tensor_flatten__")
    )
