"""Total norm of the gradients, and clipping by it, for tensors that are sharded over different meshes.

torch's ``clip_grad_norm_`` refuses to mix tensors of different meshes, or DTensors and plain tensors, which tensor
parallelism has. So each kind is measured by itself, and the norms are combined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm of all gradients of the whole model, 0-dim. Collective if gradients are sharded."""
    kinds = _by_kind(parameters, lambda each: (each.device_mesh, each.placements))
    norms = [_whole(torch.nn.utils.get_total_norm([*map(_elements, kind)])) for kind in kinds]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def clip_to_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
    for kind in _by_kind(parameters, lambda each: each.device_mesh):
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)


def _by_kind(parameters: Sequence[nn.Parameter], kind: Callable[[DTensor], Hashable]) -> list[list[nn.Parameter]]:
    """Group the parameters with a gradient: plain ones, and DTensors by ``kind`` of their gradient."""
    kinds: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _complete(parameter, parameter.grad)
            kinds[kind(gradient) if isinstance(gradient, DTensor) else None].append(parameter)
    return [*kinds.values()]


def _complete(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Sum a gradient that is spread as partial sums, as that of a norm under sequence parallelism is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _elements(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; for a sparse one (``nn.Embedding(sparse=True)``), its coalesced values."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # reduces the norms of the shards
