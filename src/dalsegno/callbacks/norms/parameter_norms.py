"""WeightNormLogger, ComputeNorm, ParameterNormLogger: norms of parameters, and of all gradients.

At first the spectral norms of all parameters of a model, sharded or not, by Lanczos iteration.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from dalsegno.callbacks.argument_checks import flag, whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import (
    DeviceScalars,
    LocalShard,
    PartialSums,
    copies_in,
    gradient_shards,
    joint_group,
    named_parameters,
    norms,
    parameter_shards,
    partial_squares,
    read_together,
    strip_wrappers,
    total_norm,
    whole_sums,
)
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import ConfigurationError
from dalsegno.events import Event, FlaglessCallback, contexts
from dalsegno.logs.rewind import Position
from dalsegno.stateful.schema import Must

TOLERANCE = 1e-3
"""Relative tolerance of the squared norm: iteration ends when an eigenvalue of WᵀW is this near to the estimate."""

Vector = Annotated[Tensor, Must("a row of float32", lambda row: row.dim() == 1 and row.dtype == torch.float32)]

_LOOK_EVERY = 8  # iterations


class SpectralNorms:
    """Computes the largest singular value of each parameter W, as a matrix of (first dimension, all others).

    Uses Lanczos iteration on WᵀW with full reorthogonalization (Golub and Van Loan, "Matrix Computations", sections
    10.1 and 10.3), in fp32, until the residual is below :data:`TOLERANCE`. The relative error of the norm is then at
    most half of that, and usually about its square. Parameters may be sharded in any way; no matrix is gathered. A rank
    multiplies the whole rows of W that it has, and DTensor the parameters that are split otherwise. The products of all
    parameters are summed in one collective per iteration, or two if one is split otherwise. For a parameter with fewer
    than two dimensions, the norm is the largest absolute value: the spectral norm of the diagonal matrix that it acts
    as. A parameter with three dimensions, except a convolution's, is a stack of matrices (say, of experts): each matrix
    has its norm, under the parameter's name and its number.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps  # at most, per measurement
        self.vectors: dict[str, Tensor] = {}
        """Right singular vector found for each matrix: shape (columns,), fp32, equal on all ranks."""
        self.unfinished: dict[str, float] = {}
        """Relative residual of the squared norm, for matrices that did not converge in the last measurement."""

    def measure(self, model: nn.Module) -> DeviceScalars:
        """Measure the present parameters, a tied one once. Collective."""
        modules = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)]
        convolved = {strip_wrappers(f"{name}.weight").lstrip(".") for name in modules}
        parameters = dict(named_parameters(model))
        shards = parameter_shards(model)
        largest = _largest(shards)
        matrices = [
            _Matrices.of(shard, parameters[shard.name], largest[shard.name], is_convolution=shard.name in convolved)
            for shard in shards
            if shard.local.dim() > 1
        ]
        values = largest | self._norms(matrices)
        names_of = {shard.name: [shard.name] for shard in shards} | {each.parameter: each.names for each in matrices}
        names = [name for its in names_of.values() for name in its]
        return DeviceScalars(names, torch.stack([values[name].cpu() for name in names]) if names else torch.zeros(0))

    def _norms(self, parameters: Sequence[_Matrices]) -> dict[str, Tensor]:
        if not parameters:
            return {}
        spaces = [[_Krylov(self._vector(each, name)) for name in each.names] for each in parameters]
        for number in range(1, self._steps + 1):
            newest = [torch.stack([space.newest for space in its]) for its in spaces]
            products = _gram_products(parameters, newest)
            for its, rows in zip(spaces, products, strict=True):
                for space, product in zip(its, rows, strict=True):
                    space.extend(product)
            if number % _LOOK_EVERY == 0 or number == self._steps:
                found = [space.largest() for its in spaces for space in its]
                (is_unfinished,) = collectives.all_reduce_max(
                    [any(each.residual > TOLERANCE for each in found)], "SpectralNorms"
                )
                if not is_unfinished:
                    break
        named = dict(zip([name for each in parameters for name in each.names], found, strict=True))
        self.vectors = {name: each.vector for name, each in named.items()}
        self.unfinished = {name: each.residual for name, each in named.items() if each.residual > TOLERANCE}
        squares = {name: each.root.cpu().double() ** 2 for each in parameters for name in each.names}
        return {name: (each.value.sqrt() * squares[name]).float() for name, each in named.items()}

    def _vector(self, matrices: _Matrices, name: str) -> Tensor:
        """Return the last vector found, or a first one: drawn from a generator seeded by the matrix's name."""
        _, length = matrices.shape
        kept = self.vectors.get(name)
        if kept is None or kept.numel() != length:
            kept = torch.randn(length, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            kept /= kept.norm()
        return kept.to(matrices.device)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A parameter as a matrix, or as a stack of them."""

    parameter: str
    names: Sequence[str]
    """Of the matrices."""
    shape: tuple[int, int]
    """Rows and columns of each."""
    weight: Tensor
    """(rows, columns) or (matrices, rows, columns): this rank's whole rows; if the parameter is split otherwise, a
    DTensor. Empty where another rank counts the parameter."""
    groups: tuple[ProcessGroup, ...]
    """The process groups that the parameter is sharded over."""
    is_split: bool
    """Whether ranks have other parts than whole rows of each matrix; equal on all ranks."""
    device: torch.device
    root: Tensor
    """Square root of the largest absolute entry, about: a power of two, so that a division by it is exact. Divided by
    it before and after a product, vectors neither vanish nor overflow."""

    @classmethod
    def of(cls, shard: LocalShard, parameter: Tensor, largest: Tensor, *, is_convolution: bool) -> _Matrices:
        place, is_stack = place_of(parameter), parameter.dim() == 3 and not is_convolution
        placements = parameter.placements if isinstance(parameter, DTensor) else place.placements if place else ()
        split = [placement.dim for placement in placements if hasattr(placement, "dim")]
        is_split = bool(split) and (is_stack or max(split) > 0)
        weight = shard.local
        if is_split and isinstance(parameter, DTensor) and (place is None or place.counts):
            weight = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        rows, *others = parameter.shape[is_stack:]
        shape = rows, math.prod(others) * (2 if parameter.is_complex() else 1)
        names = [f"{shard.name}.{number}" for number in range(len(parameter))] if is_stack else [shard.name]
        weight, device = weight.flatten(1 + is_stack), shard.local.device
        root = largest.clamp(min=torch.finfo(torch.float32).tiny).log2().div(2).round().exp2()
        return cls(shard.name, names, shape, weight, shard.groups, is_split, device, root)

    def times(self, vectors: Tensor, *, transposed: bool = False) -> Tensor:
        """Return Wv / root² for v of shape (matrices, columns): this rank's rows; if W is split otherwise, a summand of
        all rows. Transposed: this rank's summand of Wᵀv / root²."""
        length = self.shape[transposed]
        if not self.weight.numel():
            return vectors.new_zeros(len(self.names), length)
        weight = (self.weight.mT if transposed else self.weight).float()
        vectors = vectors / self.root
        operand = vectors[0] if weight.dim() == 2 else vectors.unsqueeze(-1)
        if not isinstance(weight, DTensor):
            return (weight @ operand).view(len(self.names), -1) / self.root
        product = cast(DTensor, weight @ _replicated(operand, weight))
        summand = vectors.new_zeros(product.numel())
        numbers = _replicated(torch.arange(len(summand), device=self.device).view(product.shape), weight)
        whole = [Replicate() if each.is_partial() else each for each in product.placements]
        here = numbers.redistribute(placements=whole).to_local()  # no collective: each rank takes its part
        copies = math.prod(
            size
            for size, its, result in zip(product.device_mesh.shape, weight.placements, product.placements, strict=True)
            if result.is_replicate() and not its.is_replicate()
        )
        summand[here.reshape(-1)] = product.to_local().reshape(-1) / self.root / copies
        return summand.view(len(self.names), length)


def _replicated(tensor: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _gram_products(parameters: Sequence[_Matrices], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return WᵀWv / root⁴ of each. Collective: one sum, and one before it if ranks have other parts than whole rows."""
    products = [each.times(its) for each, its in zip(parameters, vectors, strict=True)]
    split = [number for number, each in enumerate(parameters) if each.is_split]
    whole = _combined([products[number] for number in split], [parameters[number].groups for number in split])
    for number, product in zip(split, whole, strict=True):
        products[number] = product
    summands = [each.times(product, transposed=True) for each, product in zip(parameters, products, strict=True)]
    return _combined(summands, [each.groups for each in parameters])


class _Found(NamedTuple):
    value: Tensor
    """0-dim, float64, on the CPU."""
    vector: Tensor
    residual: float
    """Relative to the value."""


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
        length = accelerator.wide(product).norm()  # of one of a stack that is small beside the others
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
    own = [
        torch.linalg.vector_norm(piece.local.float(), math.inf)
        if piece.local.numel()
        else piece.local.new_zeros(()).float()
        for piece in pieces
    ]
    whole = _combined(own, [piece.groups for piece in pieces], dist.ReduceOp.MAX)
    return {piece.name: value for piece, value in zip(pieces, whole, strict=True)}


def _combined(
    parts: Sequence[Tensor],
    groups: Sequence[tuple[ProcessGroup, ...]],
    how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Reduce each part, fp32 of any shape, over the ranks that share its tensor, in one collective. ``groups``: those
    that each tensor is sharded over."""
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


# --- the callbacks --------------------------------------------------------------------------------------------------


class WeightNormLogger(FlaglessCallback):
    """Logs ``weight_norm``, the L2 norm of all parameters as one vector, at each evaluation.

    Of the weights that are evaluated: of an average, if the record has ``evaluated_weights``. Includes frozen
    parameters, and a tied parameter once; of the whole model, however it is parallelized. Waits for the device once per
    evaluation; other steps cost nothing.
    """

    optional_events = (Event.EVALUATE_BEGIN, Event.EVALUATE_END)  # a loop without them evaluates no averages

    def __init__(self) -> None:
        self._squares: PartialSums | None = None  # of the evaluation in progress

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        """Measure averages of a callback that comes before this one: it removes them before this one's next call."""
        self._squares = partial_squares(parameter_shards(ctx.model)) if ctx.evaluated_weights else None

    def on_evaluate_end(self, ctx: contexts.EvaluateEndContext) -> None:
        """Measure all others. Not collective, since an exception may have ended the evaluation."""
        if self._squares is None:
            self._squares = partial_squares(parameter_shards(ctx.model))

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "eval":
            squares, self._squares = self._squares or partial_squares(parameter_shards(ctx.model)), None
            ctx.logs["weight_norm"] = float(total_norm(*(each.roots() for each in whole_sums([squares]))))


class ComputeNorm(FlaglessCallback):
    """Logs the L2 norms of all parameters and of all gradients in each training record:

    - ``param_norm``: norm of all parameters as one vector.
    - ``grad_norm_unclipped``: norm of all gradients as one vector, reduced, unscaled and not clipped.
    - with ``per_layer``, ``param_norm/<layer>`` and ``grad_norm_unclipped/<layer>``, where a layer is a module with
      direct parameters, under its name in the model.

    Args:
        per_layer: log the norms of each layer, too.
    """

    def __init__(self, per_layer: bool = False) -> None:
        self._per_layer = flag("ComputeNorm", "per_layer", per_layer)
        self._gradients: PartialSums | None = None
        self._of_step = 0

    def on_gradients_ready(self, ctx: contexts.Context) -> None:
        if ctx.state.will_log:
            self._gradients = partial_squares(gradient_shards(ctx.model))
            self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train":
            return
        gradients, self._gradients = self._gradients, None
        measured = {"param_norm": partial_squares(parameter_shards(ctx.model))}
        if gradients is not None and self._of_step == ctx.state.global_step:
            measured["grad_norm_unclipped"] = gradients
        norms = [each.roots() for each in whole_sums([*measured.values()])]
        for title, by_parameter in zip(measured, read_together(norms), strict=True):
            self._add(ctx.logs, title, by_parameter)

    def _add(self, logs: dict[str, float], title: str, by_parameter: Mapping[str, float]) -> None:
        logs[title] = math.hypot(*by_parameter.values())
        if self._per_layer:
            by_layer: dict[str, list[float]] = defaultdict(list)
            for name, norm in by_parameter.items():
                by_layer[name.rpartition(".")[0]].append(norm)
            logs |= {f"{title}/{layer}": math.hypot(*parts) for layer, parts in by_layer.items() if layer}


class ParameterNormState(TypedDict):
    log: Position | None
    vectors: dict[str, Vector]
    last_step: int


class ParameterNormLogger(RecordCallback):
    """Logs the L2 and spectral norm of each parameter at each evaluation, in a separate log.

    ``norms`` holds the L2 norm (fp32) of each parameter; ``spectral_norms`` its largest singular value as a matrix of
    its first dimension by all others, to 0.05 % (:mod:`dalsegno.callbacks.norms.parameter_norms`). For a parameter with
    one dimension that is the largest absolute value; one with three, except a convolution's, has the value of each
    matrix in it, under ``<name>.<number>``. ``unfinished`` holds the relative residuals of those squared norms for
    which ``power_iter_steps`` were too few. The iteration resumes from its last vector, which is part of the callback's
    state; the training's random generators are not used.

    Args:
        log_norms: write ``norms``.
        log_spectral_norms: write ``spectral_norms``.
        power_iter_steps: maximum number of iterations per evaluation.
        path: of the log, as for :class:`JsonLogger`; None: ``logs/parameter_norms.jsonl``.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = ParameterNormState
    only_at_evaluations = True

    def __init__(
        self,
        log_norms: bool = True,
        log_spectral_norms: bool = True,
        power_iter_steps: int = 200,
        *,
        path: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__("logs/parameter_norms.jsonl", path, name)
        steps = whole("ParameterNormLogger", "power_iter_steps", power_iter_steps)
        self._log_norms = flag("ParameterNormLogger", "log_norms", log_norms)
        is_spectral = flag("ParameterNormLogger", "log_spectral_norms", log_spectral_norms)
        if not (log_norms or is_spectral):
            raise ConfigurationError("ParameterNormLogger: log_norms=False and log_spectral_norms=False writes nothing")
        self._spectral = SpectralNorms(steps) if is_spectral else None
        self._last_step = -1

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        if self._last_step == ctx.state.global_step:  # another set of the same evaluation
            return
        self._last_step = ctx.state.global_step
        values: dict[str, Mapping[str, float]] = {}
        if self._log_norms:
            values["norms"] = norms(parameter_shards(ctx.model)).read()
        if self._spectral is not None:
            values["spectral_norms"] = self._spectral.measure(ctx.model).read()
            if self._spectral.unfinished:
                values["unfinished"] = self._spectral.unfinished
        self.write(ctx, values)

    def state_dict(self) -> ParameterNormState:
        vectors: dict[str, Tensor] = {} if self._spectral is None else self._spectral.vectors
        return {"log": super().state_dict(), "vectors": vectors, "last_step": self._last_step}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        self._last_step = state["last_step"]
        if self._spectral is not None:
            self._spectral.vectors = dict(state["vectors"])
