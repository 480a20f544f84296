"""GradNormLogger: the norm of every parameter's gradient, at each evaluation."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dalsegno.contexts import EvaluateContext, PreOptimizerStepContext

from .record_callback import RecordCallback


class GradNormLogger(RecordCallback):
    """Writes ``norms``, the L2 norm (fp32) of each parameter's clipped gradient, into ``logs/gradient_norms.jsonl``.

    One record at each step that ends with an evaluation, under the parameters' own names; a tied parameter is there
    once, one without gradient not at all. The norms are of whole gradients, whichever way the model is spread. The
    values stay on the device until the evaluation is done; other steps cost nothing.
    """

    def __init__(self) -> None:
        super().__init__("logs/gradient_norms.jsonl")
        self._norms: GradientNorms | None = None
        self._of_step = 0

    def on_pre_optimizer_step(self, ctx: PreOptimizerStepContext) -> None:
        if ctx.state.will_evaluate:
            self._norms = GradientNorms(ctx.model)
            self._of_step = ctx.state.global_step + 1

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        norms, self._norms = self._norms, None
        if self.writing and norms is not None and self._of_step == ctx.state.global_step:
            self.write(ctx, {"norms": norms.read()})


class GradientNorms:
    """The norms of a model's gradients as they are now, still on their device. A collective where they are sharded."""

    def __init__(self, model: nn.Module) -> None:
        by_groups: dict[tuple[ProcessGroup, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # on all ranks alike, even if a rank has no gradient: all reduce alike
                by_groups[_shard_groups(parameter)].append((name, parameter))
        self._names: list[str | None] = []
        norms: list[Tensor] = []
        for groups, members in by_groups.items():
            self._names += [name if parameter.grad is not None else None for name, parameter in members]
            norms.append(_norms([_local_gradient(parameter) for _, parameter in members], groups))
        self._norms = torch.cat([part.to(norms[0].device) for part in norms]) if norms else torch.empty(0)

    def read(self) -> dict[str, float]:
        """Name to norm. Waits for the device, once."""
        return {name: norm for name, norm in zip(self._names, self._norms.tolist(), strict=True) if name is not None}


def _norms(gradients: list[Tensor], groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Norms of gradients whose pieces lie on the ranks of ``groups``: shape (number of gradients,), fp32."""
    double = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if double else torch.float32  # the norm itself cannot narrow
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))
    if groups:
        squares = norms.double().square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        norms = squares.sqrt()
    return norms.float()


def _shard_groups(parameter: nn.Parameter) -> tuple[ProcessGroup, ...]:
    """The groups over which this parameter is split; empty where every rank has all of it."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of the gradient, as a dense real tensor."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), device=parameter.device)
    if isinstance(gradient, DTensor):
        if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
