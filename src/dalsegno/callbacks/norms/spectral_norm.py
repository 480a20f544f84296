"""Spectral norms of all parameters of a model, sharded or not, by Lanczos iteration."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dalsegno.callbacks.norms.matrix_blocks import MatrixBlock, combined, gram_products, matrices_and_vectors
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import DeviceScalars, LocalShard
from dalsegno.stateful.schema import Must

TOLERANCE = 1e-3
"""Relative tolerance of the squared norm: iteration ends when an eigenvalue of WᵀW is this near to the estimate."""

Vector = Annotated[Tensor, Must("a row of float32", lambda row: row.dim() == 1 and row.dtype == torch.float32)]

_LOOK_EVERY = 8  # iterations


class SpectralNorms:
    """Computes the largest singular value of each parameter W, as a matrix of (first dimension, all others).

    Uses Lanczos iteration on WᵀW with full reorthogonalization (Golub and Van Loan, "Matrix Computations", sections
    10.1 and 10.3), in fp32, until the residual is below :data:`TOLERANCE`. The relative error of the norm is then at
    most half of that, and usually about its square. Parameters may be sharded in any way: each rank multiplies its
    blocks, and the products of all parameters are summed in one collective per iteration, or two if a parameter's
    columns are split (:mod:`~dalsegno.callbacks.norms.matrix_blocks`). For a parameter with fewer than two
    dimensions, the norm is the largest absolute value: the spectral norm of the diagonal matrix that it acts as. A
    parameter with three dimensions, except a convolution's, is a stack of matrices (say, of experts): each matrix has
    its norm, under the parameter's name and its number.
    """

    def __init__(self, steps: int) -> None:
        """``steps``: maximum number of iterations per measurement."""
        self._steps = steps
        self.vectors: dict[str, Tensor] = {}
        """Right singular vector found for each matrix: shape (columns,), fp32, equal on all ranks."""
        self.unfinished: dict[str, float] = {}
        """Relative residual of the squared norm, for matrices that did not converge in the last measurement."""

    def measure(self, model: nn.Module) -> DeviceScalars:
        """Measure the present parameters, a tied one once. Collective."""
        measured = matrices_and_vectors(model)
        values = self._norms([each for each in measured if isinstance(each, MatrixBlock)])
        values |= _largest([each for each in measured if isinstance(each, LocalShard)])
        names = [each.name for each in measured]
        return DeviceScalars(names, torch.stack([values[name].cpu() for name in names]) if names else torch.zeros(0))

    def _norms(self, blocks: Sequence[MatrixBlock]) -> dict[str, Tensor]:
        if not blocks:
            return {}
        spaces = [_Krylov(self._vector(block)) for block in blocks]
        for number in range(1, self._steps + 1):
            products = gram_products(blocks, [space.newest for space in spaces])
            for space, product in zip(spaces, products, strict=True):
                space.extend(product)
            if number % _LOOK_EVERY == 0 or number == self._steps:
                found = [space.largest() for space in spaces]
                (is_unfinished,) = collectives.all_reduce_max(
                    [any(each.residual > TOLERANCE for each in found)], "SpectralNorms"
                )
                if not is_unfinished:
                    break
        named = dict(zip([block.name for block in blocks], found, strict=True))
        self.vectors = {name: each.vector for name, each in named.items()}
        self.unfinished = {name: each.residual for name, each in named.items() if each.residual > TOLERANCE}
        return {name: each.value.sqrt().float() for name, each in named.items()}

    def _vector(self, block: MatrixBlock) -> Tensor:
        """Return the last vector found, or a first one: drawn from a generator seeded by the parameter's name."""
        _, length = block.shape
        kept = self.vectors.get(block.name)
        if kept is None or kept.numel() != length:
            kept = torch.randn(length, generator=torch.Generator().manual_seed(zlib.crc32(block.name.encode())))
            kept /= kept.norm()
        return kept.to(block.local.device)


class _Found:
    def __init__(self, value: Tensor, vector: Tensor, residual: float) -> None:
        """``value``: 0-dim, float64, on the CPU. ``residual``: relative to the value."""
        self.value, self.vector, self.residual = value, vector, residual


class _Krylov:
    """Krylov space of v, A v, A² v, ... for a symmetric A, with the tridiagonal matrix of A in it."""

    def __init__(self, start: Tensor) -> None:
        self._basis = start.unsqueeze(0)  # (vectors, length), orthonormal
        self._diagonal: list[Tensor] = []
        self._beside: list[Tensor] = []

    @property
    def newest(self) -> Tensor:
        return self._basis[-1]

    def extend(self, product: Tensor) -> None:
        """``product``: A times the newest vector."""
        self._diagonal.append(product @ self.newest)
        for _ in range(2):  # a single pass leaves rounding errors
            product = product - self._basis.T @ (self._basis @ product)
        length = product.norm()
        is_new = length > 1e-6 * self._diagonal[0].abs()  # else the space is complete
        self._beside.append(torch.where(is_new, length, torch.zeros_like(length)))
        added = torch.where(is_new, product / length, torch.zeros_like(product))
        self._basis = torch.cat([self._basis, added.unsqueeze(0)])

    def largest(self) -> _Found:
        """Estimate the largest eigenvalue. Waits for the device."""
        entries = torch.stack([torch.stack(self._diagonal), torch.stack(self._beside)]).cpu().double()
        start = self._basis[0]
        if not entries.isfinite().all():
            return _Found(torch.tensor(math.nan, dtype=torch.float64), start, 0.0)
        diagonal, beside = entries
        tridiagonal = torch.diag(diagonal) + torch.diag(beside[:-1], 1) + torch.diag(beside[:-1], -1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        value, mix = values[-1].clamp(min=0), vectors[:, -1]
        if value == 0:  # a zero matrix has no direction
            return _Found(value, start, 0.0)
        vector = self._basis[:-1].T @ mix.to(self._basis)
        return _Found(value, vector / vector.norm(), float(beside[-1] * mix[-1].abs() / value))


def _largest(pieces: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Return the largest absolute value of each. Collective."""
    zero = [piece.local.new_zeros(1, dtype=torch.float32) for piece in pieces]  # for a rank with an empty shard
    own = [
        torch.cat([piece.local.reshape(-1).float().abs(), nothing]).max()
        for piece, nothing in zip(pieces, zero, strict=True)
    ]
    whole = combined(own, [piece.groups for piece in pieces], dist.ReduceOp.MAX)
    return {piece.name: value for piece, value in zip(pieces, whole, strict=True)}
