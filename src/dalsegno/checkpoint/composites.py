"""Composite tensors: sparse ones, and torch's own quantized ones, as the plain values that they consist of.

======================  ================================================================================
``sparse_coo``          ``indices``, ``values``, ``coalesced``
``sparse_csr`` …        ``compressed``, ``plain``, ``values``
``qint8``, ``quint4x2`` ``elements`` (bytes), ``scheme``, and ``scale`` and ``zero_point``, or ``scales``,
…                       ``zero_points`` and ``axis``
======================  ================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dalsegno.checkpoint.tensor_files import name_of

Values = dict[str, Any]
"""Plain tensors, numbers and texts by name."""

_SPARSE = {
    name_of(each): each
    for each in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_QUANTIZED = {
    name: getattr(torch, name)
    for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)  # torch has announced that it will remove them
}
_DENSEST = 4  # elements of the narrowest in a byte

KINDS = frozenset((*_SPARSE, *_QUANTIZED))
"""Names of the layouts and dtypes."""


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of one of these kinds, and has data."""
    return _kind_of(tensor) in KINDS and type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def take_apart(tensor: torch.Tensor) -> tuple[str, Values]:
    """Kind and values of a composite tensor. Those of a sparse one share its memory."""
    tensor, kind = tensor.detach(), _kind_of(tensor)
    if kind in _QUANTIZED:
        return kind, _values_of_quantized(tensor)
    if kind == "sparse_coo":
        return kind, {
            "indices": tensor._indices(),  # as they are: coalesced or not
            "values": tensor._values(),
            "coalesced": tensor.is_coalesced(),
        }
    is_by_row = tensor.layout in _BY_ROW
    compressed, plain = (
        (tensor.crow_indices(), tensor.col_indices()) if is_by_row else (tensor.ccol_indices(), tensor.row_indices())
    )
    return kind, {"compressed": compressed, "plain": plain, "values": tensor.values()}


def put_together(kind: str, shape: Sequence[int], values: Values) -> torch.Tensor:
    """The tensor of these values, which may be hostile.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: if they are not those of such a tensor.
    """
    if kind in _QUANTIZED:
        return _quantized(_QUANTIZED[kind], shape, values)
    if kind == "sparse_coo":
        indices, elements = values["indices"], values["values"]
        return torch.sparse_coo_tensor(
            indices, elements, list(shape), check_invariants=True, is_coalesced=values["coalesced"]
        )
    return torch.sparse_compressed_tensor(
        values["compressed"],
        values["plain"],
        values["values"],
        list(shape),
        layout=_SPARSE[kind],
        check_invariants=True,
    )


def describe_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """How they differ in their form; empty if the values of one can be loaded into the other."""
    saved, here = _form_of(one), _form_of(other)
    return "" if saved == here else f"saved as {saved}, here {here}"


def make_room(here: object, saved: Any) -> None:
    """Give a compressed sparse tensor as many elements as ``saved``, as ``copy_`` needs. Does nothing with others."""
    if isinstance(here, torch.Tensor) and here.layout in _SPARSE.values() and here.layout != torch.sparse_coo:
        here.detach().resize_as_sparse_(saved.to(here.device))


def _kind_of(tensor: torch.Tensor) -> str:
    return name_of(tensor.dtype if tensor.layout == torch.strided else tensor.layout)


def _form_of(tensor: torch.Tensor) -> str:
    """What must be equal for ``copy_``, and what it does not copy: the dtype of the indices."""
    form = f"{_kind_of(tensor)} {list(tensor.shape)} {name_of(tensor.dtype)}"
    if tensor.is_quantized:
        return f"{form} {name_of(tensor.qscheme())}"
    if tensor.layout == torch.sparse_coo:
        return f"{form} with {tensor.sparse_dim()} sparse dimensions"
    if tensor.layout in _SPARSE.values():
        indices = tensor.crow_indices() if tensor.layout in _BY_ROW else tensor.ccol_indices()
        return f"{form} with {tensor.dense_dim()} dense dimensions and indices of {name_of(indices.dtype)}"
    return form


def _values_of_quantized(tensor: torch.Tensor) -> Values:
    scheme = tensor.qscheme()
    # A view has the storage of a larger tensor. torch has neither views nor clones of those that share bytes.
    is_view_possible = scheme != torch.per_channel_affine_float_qparams
    whole = tensor.clone(memory_format=torch.contiguous_format) if is_view_possible else tensor
    elements = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole.untyped_storage())
    values: Values = {"elements": elements, "scheme": name_of(scheme)}
    if scheme == torch.per_tensor_affine:
        return values | {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return values | {
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
        "axis": tensor.q_per_channel_axis(),
    }


def _quantized(dtype: torch.dtype, shape: Sequence[int], values: Values) -> torch.Tensor:
    elements = _tensor(values["elements"])
    if elements.dtype != torch.uint8 or elements.dim() != 1 or math.prod(shape) > _DENSEST * len(elements):
        raise ValueError("not the elements of a tensor of that shape")
    tensor = _EMPTY[values["scheme"]](list(shape), dtype, values)
    storage = tensor.untyped_storage()
    if storage.nbytes() != len(elements):
        raise ValueError("not as many elements as in a tensor of that shape")
    storage.copy_(elements.untyped_storage())
    return tensor


def _empty_per_tensor(shape: list[int], dtype: torch.dtype, values: Values) -> torch.Tensor:
    return torch._empty_affine_quantized(shape, scale=values["scale"], zero_point=values["zero_point"], dtype=dtype)


def _empty_per_channel(shape: list[int], dtype: torch.dtype, values: Values) -> torch.Tensor:
    scales, zero_points, axis = _tensor(values["scales"]), _tensor(values["zero_points"]), values["axis"]
    if not 0 <= axis < len(shape) or not scales.shape == zero_points.shape == (shape[axis],):
        raise ValueError("not a scale and a zero point for each channel")
    return torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype
    )


_EMPTY: Mapping[str, Callable[[list[int], torch.dtype, Values], torch.Tensor]] = {
    "per_tensor_affine": _empty_per_tensor,
    "per_channel_affine": _empty_per_channel,
    "per_channel_affine_float_qparams": _empty_per_channel,
}


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("not a tensor")
    return value
