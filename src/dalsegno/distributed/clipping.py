"""Total norm of the gradients, and clipping by it, for tensors that are sharded over different meshes.

torch's ``clip_grad_norm_`` refuses to mix tensors of different meshes, or DTensors and plain tensors, which tensor
parallelism has. So tensors that are sharded alike are measured together, and their norms are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
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
        norm = torch.nn.utils.get_total_norm(_elements(chain.from_iterable(kinds.values())))
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # reduces the norms of the shards
    norms = [torch.nn.utils.get_total_norm(map(dense, _elements(alike))) for alike in kinds.values()]
    wide = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in norms]
    return summed(torch.stack(wide).square(), [groups or () for groups in kinds]).sum().sqrt()


def clip_to_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
    for alike in _by_kind(parameters, _mesh_of).values():
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def complete(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Sum a gradient that is spread as partial sums, as that of a norm under sequence parallelism is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _by_kind(parameters: Sequence[nn.Parameter], kind: Callable[[Tensor], K]) -> dict[K | None, list[nn.Parameter]]:
    """Group the parameters that have a gradient by a property of that; None: those that are not DTensors."""
    kinds: dict[K | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            its = kind(complete(parameter, gradient)) if isinstance(parameter, DTensor) else None
            kinds.setdefault(its, []).append(parameter)
    return kinds


def _mesh_of(gradient: Tensor) -> DeviceMesh | None:
    return gradient.device_mesh if isinstance(gradient, DTensor) else None


def _elements(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; for sparse ones (``nn.Embedding(sparse=True)``), their coalesced values."""
    elements: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            elements.append(parameter.grad.values())
        else:
            elements.append(parameter.grad)
    return elements
