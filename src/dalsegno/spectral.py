"""Spectral norms of all of a model's parameters, by power iteration, wherever their pieces lie."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from .pieces import Piece, Readings, named_parameters, parameter_pieces


class SpectralNorms:
    """The largest singular value of each parameter W, seen as a matrix of (first dimension, all others).

    Power iteration on WᵀW (Golub and Van Loan, "Matrix Computations", section 8.2): v ← Wᵀ W v, normalized; the norm
    is ‖W v‖. In fp32. Rows may be split over the ranks: each multiplies its own, the products of all parameters are
    summed in one collective an iteration. Of a parameter with fewer than two dimensions it is the largest absolute
    value: the spectral norm of the diagonal matrix that it acts as.
    """

    def __init__(self, steps: int) -> None:
        """``steps``: iterations at each measurement; a parameter's first one takes twice as many."""
        self._steps = steps
        self.vectors: dict[str, Tensor] = {}
        """v of each parameter: shape (product of all dimensions but the first,), fp32, the same on every rank."""

    def measure(self, model: nn.Module) -> Readings:
        """Of the parameters as they are now, each once. Collective where they are sharded."""
        parameters = [parameter for _, parameter in named_parameters(model)]
        pieces = [_by_rows(*each) for each in zip(parameters, parameter_pieces(model), strict=True)]
        matrices = [piece for piece in pieces if piece.local.dim() > 1]
        fresh = any(piece.name not in self.vectors for piece in matrices)
        vectors = [self._vector(piece) for piece in matrices]
        for _ in range(self._steps * (2 if fresh else 1)):
            vectors = _iterated(matrices, vectors)
        self.vectors = {piece.name: vector for piece, vector in zip(matrices, vectors, strict=True)}
        values = _stretches(matrices, vectors) | _largest([piece for piece in pieces if piece.local.dim() < 2])
        names = [piece.name for piece in pieces]
        return Readings(names, torch.stack([values[name] for name in names]) if names else torch.zeros(0))

    def _vector(self, piece: Piece) -> Tensor:
        """The one kept, or the one to begin with: drawn by a generator that depends on the name alone."""
        length = math.prod(piece.local.shape[1:])
        kept = self.vectors.get(piece.name)
        if kept is None or kept.numel() != length:
            kept = torch.randn(length, generator=torch.Generator().manual_seed(zlib.crc32(piece.name.encode())))
            kept /= kept.norm()
        return kept.to(piece.local.device)


def _by_rows(parameter: Tensor, piece: Piece) -> Piece:
    """The piece, if it is whole rows of the parameter; else all of the parameter, gathered."""
    if not isinstance(parameter, DTensor) or not any(
        isinstance(placement, Shard) and placement.dim != 0 for placement in parameter.placements
    ):
        return piece
    whole = parameter.full_tensor().detach()
    return Piece(piece.name, torch.view_as_real(whole) if whole.is_complex() else whole, ())


def _matrix(piece: Piece) -> Tensor:
    return piece.local.flatten(1).float()


def _iterated(matrices: Sequence[Piece], vectors: Sequence[Tensor]) -> list[Tensor]:
    """v ← Wᵀ W v, normalized; where that has no direction (a matrix of zeros, or not finite), v stays."""
    own = [_matrix(piece).T @ (_matrix(piece) @ vector) for piece, vector in zip(matrices, vectors, strict=True)]
    products = _summed(own, matrices)
    lengths = [product.norm() for product in products]
    return [
        torch.where((length > 0) & length.isfinite(), product / length, vector)
        for product, length, vector in zip(products, lengths, vectors, strict=True)
    ]


def _stretches(matrices: Sequence[Piece], vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """‖W v‖ of each."""
    own = [(_matrix(piece) @ vector).square().sum() for piece, vector in zip(matrices, vectors, strict=True)]
    squares = _summed(own, matrices)
    return {piece.name: square.sqrt() for piece, square in zip(matrices, squares, strict=True)}


def _largest(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """The largest absolute value of each."""
    zero = [piece.local.new_zeros(1, dtype=torch.float32) for piece in pieces]  # for a rank that has no part of it
    own = [
        torch.cat([piece.local.reshape(-1).float().abs(), nothing]).max()
        for piece, nothing in zip(pieces, zero, strict=True)
    ]
    combined = _combined(own, pieces, dist.ReduceOp.MAX)
    return {piece.name: value for piece, value in zip(pieces, combined, strict=True)}


def _summed(parts: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    return _combined(parts, pieces, dist.ReduceOp.SUM)


def _combined(parts: Sequence[Tensor], pieces: Sequence[Piece], how: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Each part, reduced over the ranks that share its piece: those shared by the same ranks in one collective."""
    combined = list(parts)
    shared: dict[tuple[ProcessGroup, ...], list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        if piece.groups:
            shared[piece.groups].append(number)
    for groups, members in shared.items():
        flat = torch.cat([parts[number].reshape(-1) for number in members])
        for group in groups:
            dist.all_reduce(flat, how, group=group)
        for number, reduced in zip(members, torch.split(flat, [parts[each].numel() for each in members]), strict=True):
            combined[number] = reduced.reshape(parts[number].shape)
    return combined
