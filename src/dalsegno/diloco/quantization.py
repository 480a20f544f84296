"""Quantization: pseudo-gradients as int8, with a float32 scale for each group of elements.

On the wire, a tensor is one of int8: its elements, then the bytes of its scales. An element is at most half a scale
away from its value; the worker adds what was lost to its next pseudo-gradient (error feedback, Seide et al. 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256
"""Elements with one scale: the largest absolute value among them, divided by 127."""

_SCALE = 4  # bytes


def coded_size(count: int) -> int:
    """Bytes of ``count`` elements and their scales."""
    return count + _SCALE * -(-count // GROUP)


def element_count(size: int) -> int:
    """The inverse of :func:`coded_size`."""
    return size - _SCALE * -(-size // (GROUP + _SCALE))


def quantize(values: Tensor) -> Tensor:
    """Code a tensor of any shape: int8, of shape (:func:`coded_size`,). Scales of NaN or infinity remain."""
    flat = values.float().reshape(-1)
    groups = torch.nn.functional.pad(flat, (0, -len(flat) % GROUP)).view(-(-len(flat) // GROUP), GROUP)
    scales = groups.abs().amax(1) / 127
    divisors = torch.where(scales > 0, scales, 1.0)
    elements = (groups / divisors[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([elements.view(-1)[: len(flat)], scales.view(torch.int8)])


def dequantize(elements: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of int8 elements, flat. The first one begins a group.

    Args:
        elements: (count,), int8.
        scales: of their groups, float32.
    """
    return elements.float().mul_(scales.repeat_interleave(GROUP)[: len(elements)])


def as_received(values: Tensor) -> Tensor:
    """What the server decodes from ``quantize(values)``; float32, of the same shape."""
    coded = quantize(values)
    count = values.numel()
    return dequantize(coded[:count], coded[count:].clone().view(torch.float32)).view(values.shape)
