"""Signature: names, dtypes and shapes of a DiLoCo run's trained parameters, their fragments, their form on the wire.

All workers of a run have the same signature. What a server or a worker receives is compared with it before a byte of a
tensor is taken.

Pseudo-gradients may travel as int8, with a float32 scale for each group of elements. Such a tensor is one of int8: its
elements, then the bytes of its scales. An element is at most half a scale away from its value; the worker adds what was
lost to its next pseudo-gradient (error feedback, Seide et al. 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from dalsegno.checkpoint.tensor_files import DTYPES, FileLayout, TensorChunk, byte_count, is_shape, name_of
from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful import schema

GROUP = 256
"""Elements with one scale: the largest absolute value among them, divided by 127."""

_SCALE = 4  # bytes
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST_TENSORS = 1 << 20
_LONGEST_NAME = 1000  # characters


_Name = Annotated[str, schema.Must("a name", lambda name: 0 < len(name) <= _LONGEST_NAME)]
_Dtype = Annotated[str, schema.Must("a floating-point dtype", lambda name: DTYPES[name] in _FLOATS)]
_Shape = Annotated[list[int], schema.Must("a shape", is_shape)]


class TensorJson(TypedDict):
    name: _Name
    dtype: _Dtype
    shape: _Shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return byte_count(self.shape, self.dtype)

    def to_json(self) -> TensorJson:
        return {"name": self.name, "dtype": name_of(self.dtype), "shape": list(self.shape)}


Specs = tuple[TensorSpec, ...]


def specs_of(model: nn.Module) -> Specs:
    """The trained parameters of ``model``, a tied one once, with the shapes of full tensors."""
    specs = tuple(
        TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in named_parameters(model) if each.requires_grad
    )
    other = next((spec for spec in specs if spec.dtype not in _FLOATS), None)
    if other is not None:
        raise ConfigurationError(f"DiLoCo: {other.name} is {name_of(other.dtype)}; only real floats can be averaged")
    if not specs:
        raise ConfigurationError("DiLoCo: no parameter of the model requires a gradient")
    return specs


def specs_from_json(content: Any) -> Specs:
    schema.check(content, list[TensorJson], "tensors", ConfigurationError)
    names = [each["name"] for each in content]
    if not 0 < len(names) <= _MOST_TENSORS or len(set(names)) != len(names):
        raise ConfigurationError(f"tensors: needs 1 to {_MOST_TENSORS} tensors with distinct names")
    return tuple(TensorSpec(each["name"], DTYPES[each["dtype"]], tuple(each["shape"])) for each in content)


def check_same(own: Specs, given: Specs) -> None:
    """Raises StateMismatch if ``given``, of a worker, differs from ``own``, of the server; names the first
    difference."""
    ours, theirs = ({spec.name: spec for spec in specs} for specs in (own, given))
    for name, spec in ours.items():
        if name not in theirs:
            raise StateMismatch(f"another model: the worker does not train {name}, which this run trains")
        other = theirs[name]
        if other != spec:
            raise StateMismatch(f"another model: {name} is {_form(other)} in the worker, {_form(spec)} in this run")
    extra = next((name for name in theirs if name not in ours), None)
    if extra is not None:
        raise StateMismatch(f"another model: the worker trains {extra}, which this run does not")
    if own != given:
        raise StateMismatch("another model: the worker has the same parameters in another order")


def fragments_of(specs: Specs, count: int) -> list[Specs]:
    """``count`` contiguous fragments whose largest has as few bytes as possible."""
    if count > len(specs):
        raise ConfigurationError(f"num_fragments={count}: the model has only {len(specs)} trained tensors")
    low, high = max(spec.size for spec in specs), sum(spec.size for spec in specs)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(specs, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _filled(specs, low)
    while len(parts) < count:  # fewer suffice: split the largest that can be split
        largest = max((part for part in parts if len(part) > 1), key=lambda part: sum(spec.size for spec in part))
        place = parts.index(largest)
        parts[place : place + 1] = fragments_of(largest, 2)
    return parts


def _filled(specs: Sequence[TensorSpec], most: int) -> list[Specs]:
    """Fill fragments one after the other with up to ``most`` bytes each."""
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if parts[-1] and size + spec.size > most:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += spec.size
    return [tuple(part) for part in parts]


def as_sent(specs: Specs, *, bf16: bool, int8: bool = False) -> Specs:
    """The form of pseudo-gradients on the wire: int8 with scales, bfloat16, or at least float32."""
    if int8:
        return tuple(TensorSpec(spec.name, torch.int8, (coded_size(spec.count),)) for spec in specs)
    return tuple(replace(spec, dtype=torch.bfloat16 if bf16 else master_dtype(spec.dtype)) for spec in specs)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the server keeps a parameter: at least float32."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32


def file_layout(specs: Specs) -> FileLayout:
    """The safetensors file of such tensors. Equal specs give equal bytes up to the first tensor."""
    return FileLayout.of(
        [TensorChunk(spec.name, spec.dtype, spec.shape, (0,) * len(spec.shape), spec.shape) for spec in specs]
    )


def _form(spec: TensorSpec) -> str:
    return f"{name_of(spec.dtype)} {list(spec.shape)}"


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
    """The float32 values of int8 elements, shape (count,), of which the first one begins a group; ``scales``: of their
    groups."""
    return elements.float().mul_(scales.repeat_interleave(GROUP)[: len(elements)])


def as_received(values: Tensor) -> Tensor:
    """What the server decodes from ``quantize(values)``; float32, of the same shape."""
    coded = quantize(values)
    count = values.numel()
    return dequantize(coded[:count], coded[count:].clone().view(torch.float32)).view(values.shape)
