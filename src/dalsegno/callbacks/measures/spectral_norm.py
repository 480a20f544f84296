"""Spectral norms of all parameters of a model, sharded or not, by Lanczos iteration."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import (
    DeviceScalars,
    LocalShard,
    named_parameters,
    parameter_shards,
    strip_wrappers,
)
from dalsegno.distributed.stage_places import place_of
from dalsegno.stateful.schema import Must

TOLERANCE = 1e-3
"""Relative tolerance of the squared norm: iteration ends when an eigenvalue of WᵀW is this near to the estimate."""

Vector = Annotated[Tensor, Must("a row of float32", lambda row: row.dim() == 1 and row.dtype == torch.float32)]

_LOOK_EVERY = 8  # iterations


class SpectralNorms:
    """Computes the largest singular value of each parameter W, as a matrix of (first dimension, all others).

    Uses Lanczos iteration on WᵀW with full reorthogonalization (Golub and Van Loan, "Matrix Computations", sections
    10.1 and 10.3), in fp32, until the residual is below :data:`TOLERANCE`. The relative error of the norm is then at
    most half of that, and usually about its square. Rows may be sharded over ranks: each rank multiplies its rows, and
    the products of all parameters are summed in one collective per iteration. For a parameter with fewer than two
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
        pieces = list(_measured(model))
        matrices = [piece for piece in pieces if piece.local.dim() > 1]
        values = self._norms(matrices) | _largest([piece for piece in pieces if piece.local.dim() < 2])
        names = [piece.name for piece in pieces]
        return DeviceScalars(names, torch.stack([values[name].cpu() for name in names]) if names else torch.zeros(0))

    def _norms(self, matrices: Sequence[LocalShard]) -> dict[str, Tensor]:
        if not matrices:
            return {}
        spaces = [_Krylov(self._vector(piece)) for piece in matrices]
        for number in range(1, self._steps + 1):
            products = _products(matrices, [space.newest for space in spaces])
            for space, product in zip(spaces, products, strict=True):
                space.extend(product)
            if number % _LOOK_EVERY == 0 or number == self._steps:
                found = [space.largest() for space in spaces]
                (is_unfinished,) = collectives.all_reduce_max(
                    [any(each.residual > TOLERANCE for each in found)], "SpectralNorms"
                )
                if not is_unfinished:
                    break
        named = dict(zip([piece.name for piece in matrices], found, strict=True))
        self.vectors = {name: each.vector for name, each in named.items()}
        self.unfinished = {name: each.residual for name, each in named.items() if each.residual > TOLERANCE}
        return {name: each.value.sqrt().float() for name, each in named.items()}

    def _vector(self, piece: LocalShard) -> Tensor:
        """Return the last vector found, or a first one: drawn from a generator seeded by the parameter's name."""
        length = math.prod(piece.local.shape[1:])
        kept = self.vectors.get(piece.name)
        if kept is None or kept.numel() != length:
            kept = torch.randn(length, generator=torch.Generator().manual_seed(zlib.crc32(piece.name.encode())))
            kept /= kept.norm()
        return kept.to(piece.local.device)


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


def _measured(model: nn.Module) -> Iterator[LocalShard]:
    """Yield each parameter's shard, of whole rows; for stacked matrices, each whole matrix."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, _ConvNd)]
    convolved = {strip_wrappers(f"{name}.weight").lstrip(".") for name, _ in modules}
    parameters = dict(named_parameters(model))
    for piece in parameter_shards(model):
        parameter = parameters[piece.name]
        if parameter.dim() != 3 or piece.name in convolved:
            yield _by_rows(parameter, piece)
            continue
        whole = _whole(parameter, piece)
        for number in range(len(parameter)):
            matrix = whole.local[number] if len(whole.local) else whole.local.flatten(0, 1)  # of another stage: no rows
            yield LocalShard(f"{piece.name}.{number}", matrix, whole.groups)


def _by_rows(parameter: Tensor, piece: LocalShard) -> LocalShard:
    """Return the shard if it consists of whole rows of the parameter; else gather the parameter."""
    place = place_of(parameter)
    placements = parameter.placements if isinstance(parameter, DTensor) else () if place is None else place.placements
    is_by_rows = not any(getattr(placement, "dim", 0) for placement in placements)  # of a shard, strided or not
    return piece if is_by_rows else _whole(parameter, piece)


def _whole(parameter: Tensor, piece: LocalShard) -> LocalShard:
    """Gather the whole parameter on each rank; under a pipeline, on those of one stage."""
    place = place_of(parameter)
    groups = () if place is None else (place.pipeline,)
    if not isinstance(parameter, DTensor) or (place is not None and not place.counts):
        return LocalShard(piece.name, piece.local, groups)
    whole = parameter.full_tensor().detach()
    return LocalShard(piece.name, torch.view_as_real(whole) if whole.is_complex() else whole, groups)


def _matrix(piece: LocalShard) -> Tensor:
    return piece.local.flatten(1).float()


def _products(matrices: Sequence[LocalShard], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return Wᵀ W v of each."""
    own = [_matrix(piece).T @ (_matrix(piece) @ vector) for piece, vector in zip(matrices, vectors, strict=True)]
    return _combined(own, matrices, dist.ReduceOp.SUM)


def _largest(pieces: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Return the largest absolute value of each."""
    zero = [piece.local.new_zeros(1, dtype=torch.float32) for piece in pieces]  # for a rank with an empty shard
    own = [
        torch.cat([piece.local.reshape(-1).float().abs(), nothing]).max()
        for piece, nothing in zip(pieces, zero, strict=True)
    ]
    combined = _combined(own, pieces, dist.ReduceOp.MAX)
    return {piece.name: value for piece, value in zip(pieces, combined, strict=True)}


def _combined(parts: Sequence[Tensor], pieces: Sequence[LocalShard], how: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Reduce each part over the ranks that share its parameter, in one collective per set of process groups."""
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
