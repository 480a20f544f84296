"""Total norm of the gradients, and clipping by it, for tensors that are sharded over different meshes.

torch's ``clip_grad_norm_`` refuses to mix tensors of different meshes, or DTensors and plain tensors, which tensor
parallelism has. So tensors that are sharded alike are measured together, and their norms are combined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .sharded_tensors import dense, mesh_groups, summed

K = TypeVar("K", bound=Hashable)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm of all gradients, 0-dim; of full tensors, but under a pipeline of this rank's stages only.
    Collective if gradients are sharded."""
    kinds = _by_kind(parameters, mesh_groups)
    if len(kinds) < 2:
        norm = torch.nn.utils.get_total_norm([_elements(each) for alike in kinds.values() for each in alike])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # reduces the norms of the shards
    norms = [torch.nn.utils.get_total_norm([dense(_elements(each)) for each in alike]) for alike in kinds.values()]
    wide = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in norms]
    return summed(torch.stack(wide).square(), [*kinds]).sum().sqrt()


def clip_to_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
    for alike in _by_kind(parameters, _mesh_of).values():
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def complete(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Sum a gradient that is spread as partial sums, as that of a norm under sequence parallelism is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _by_kind(parameters: Sequence[nn.Parameter], kind: Callable[[Tensor], K]) -> dict[K, list[nn.Parameter]]:
    """Group the parameters that have a gradient by a property of that."""
    kinds: dict[K, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[kind(complete(parameter, parameter.grad))].append(parameter)
    return kinds


def _mesh_of(gradient: Tensor) -> DeviceMesh | None:
    return gradient.device_mesh if isinstance(gradient, DTensor) else None


def _elements(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; for a sparse one (``nn.Embedding(sparse=True)``), its coalesced values."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
