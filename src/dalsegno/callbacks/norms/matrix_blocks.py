"""The blocks of a model's matrices that this rank holds, however they are split, and products with them.

A rank that holds whole rows of W needs no other rank for its part of WᵀWv. Where columns are split too (by a layer that
tensor parallelism splits by its input, say), Wv is summed over the ranks first. So no matrix is ever gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.conv import _ConvNd

from dalsegno.distributed.sharded_tensors import (
    LocalShard,
    copies_in,
    joint_group,
    named_parameters,
    parameter_shards,
    strip_wrappers,
)
from dalsegno.distributed.stage_places import place_of


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """This rank's block of a matrix W."""

    name: str
    local: Tensor
    """Shape (rows here, columns here), of any dtype."""
    groups: tuple[ProcessGroup, ...]
    """The process groups that the matrix is sharded over."""
    shape: tuple[int, int]
    """Of the whole matrix."""
    rows: slice
    """Where the block lies, if columns are split."""
    columns: Tensor | None
    """Numbers of the columns here; None if all ranks hold whole rows."""

    def times(self, vector: Tensor) -> Tensor:
        """Return this rank's part of W v: its rows; or, if columns are split, a summand of all rows."""
        if self.columns is None:
            return self.local.float() @ vector
        product = vector.new_zeros(self.shape[0])
        product[self.rows] = self.local.float() @ vector[self.columns]
        return product

    def transposed_times(self, product: Tensor) -> Tensor:
        """Return this rank's summand of Wᵀ p, for its rows of p; or, if columns are split, for the whole p."""
        if self.columns is None:
            return self.local.float().T @ product
        summand = product.new_zeros(self.shape[1])
        summand[self.columns] = self.local.float().T @ product[self.rows]
        return summand


def gram_products(blocks: Sequence[MatrixBlock], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return Wᵀ W v of each. Collective: one sum, and one before it if columns of a matrix are split."""
    products = [block.times(vector) for block, vector in zip(blocks, vectors, strict=True)]
    split = [number for number, block in enumerate(blocks) if block.columns is not None]
    whole = combined([products[number] for number in split], [blocks[number].groups for number in split])
    for number, product in zip(split, whole, strict=True):
        products[number] = product
    summands = [block.transposed_times(product) for block, product in zip(blocks, products, strict=True)]
    return combined(summands, [block.groups for block in blocks])


def combined(
    parts: Sequence[Tensor],
    groups: Sequence[tuple[ProcessGroup, ...]],
    how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Reduce each part over the ranks that share its tensor, in one collective.

    Args:
        parts: fp32, of any shape; on this rank.
        groups: the process groups that each tensor is sharded over.
        how: a sum, or a maximum.
    """
    reduced = list(parts)
    group = joint_group(groups)
    if group is None:
        return reduced
    members = [number for number, its in enumerate(groups) if its]
    flat = torch.cat([parts[number].reshape(-1) for number in members])
    dist.all_reduce(flat, how, group=group)
    for number, part in zip(members, torch.split(flat, [parts[each].numel() for each in members]), strict=True):
        copies = copies_in(group, groups[number]) if how == dist.ReduceOp.SUM else 1
        reduced[number] = (part / copies if copies > 1 else part).reshape(parts[number].shape)
    return reduced


def matrices_and_vectors(model: nn.Module) -> list[MatrixBlock | LocalShard]:
    """Return the blocks of all parameters with at least two dimensions, each as a matrix of its first dimension by all
    others, and the shards of the other parameters, in the model's order.

    A parameter with three dimensions, except a convolution's, is a stack of matrices, named by their numbers.
    """
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, _ConvNd)]
    convolved = {strip_wrappers(f"{name}.weight").lstrip(".") for name, _ in modules}
    parameters = dict(named_parameters(model))
    found: list[MatrixBlock | LocalShard] = []
    for piece in parameter_shards(model):
        parameter = parameters[piece.name]
        if piece.local.dim() < 2:
            found.append(piece)
        elif parameter.dim() == 3 and piece.name not in convolved:
            found += _stacked(parameter, piece)
        else:
            offset, cut = _offset(parameter), _cut(parameter)
            found.append(_block(piece.name, piece.local, piece.groups, _shape(parameter), offset, cut))
    return found


def _stacked(parameter: Tensor, piece: LocalShard) -> Iterator[MatrixBlock]:
    first, *offset = _offset(parameter)
    cut = [dimension - 1 for dimension in _cut(parameter)]
    for number in range(len(parameter)):
        is_here = first <= number < first + len(piece.local)
        local = piece.local[number - first] if is_here else piece.local[:0].flatten(0, 1)
        yield _block(f"{piece.name}.{number}", local, piece.groups, _shape(parameter)[1:], offset, cut)


def _block(
    name: str,
    local: Tensor,
    groups: tuple[ProcessGroup, ...],
    shape: Sequence[int],
    offset: Sequence[int],
    cut: Sequence[int],
) -> MatrixBlock:
    """
    Args:
        name: of the matrix.
        local: of as many dimensions as ``shape``.
        groups: over which it is sharded.
        shape: of the whole tensor.
        offset: of ``local`` in it.
        cut: dimensions in which it is split.
    """
    columns = None
    if any(dimension > 0 for dimension in cut):
        numbers = torch.arange(math.prod(shape[1:]), device=local.device).view(*shape[1:])
        for dimension, (begin, length) in enumerate(zip(offset[1:], local.shape[1:], strict=True)):
            numbers = numbers.narrow(dimension, begin, length)
        columns = numbers.reshape(-1)
    rows = slice(offset[0], offset[0] + len(local))
    return MatrixBlock(name, local.flatten(1), groups, (shape[0], math.prod(shape[1:])), rows, columns)


def _shape(parameter: Tensor) -> list[int]:
    """Shape of the whole parameter; of a complex one, with its two parts in the last dimension."""
    return [*parameter.shape, *([2] if parameter.is_complex() else [])]


def _offset(parameter: Tensor) -> list[int]:
    """Where this rank's part begins; zeros if another stage of a pipeline holds it."""
    place = place_of(parameter)
    begin: Sequence[int] = [0] * parameter.dim()
    if isinstance(parameter, DTensor) and (place is None or place.counts):
        _, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return [*begin, *([0] if parameter.is_complex() else [])]


def _cut(parameter: Tensor) -> list[int]:
    """The dimensions in which a parameter is split; equal on all ranks."""
    place = place_of(parameter)
    placements = parameter.placements if isinstance(parameter, DTensor) else () if place is None else place.placements
    return [placement.dim for placement in placements if hasattr(placement, "dim")]
