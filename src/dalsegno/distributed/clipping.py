"""Total norm of the gradients, and clipping by it, for plain tensors and for those sharded over different meshes.

torch's ``clip_grad_norm_`` refuses to mix tensors of different meshes, or DTensors and plain tensors, which tensor
parallelism has. So tensors that are sharded alike are measured together, and their norms are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .sharded_tensors import dense, mesh_groups, summed

K = TypeVar("K", bound=Hashable)

ClipGradients = Callable[[float], Tensor]
"""Clips the gradients to a total L2 norm of the given value (0: no clipping). Returns the norm before it, 0-dim: the
full model's, reduced over the ranks of a sharded one."""


def clipping_of(parameters: Sequence[nn.Parameter]) -> ClipGradients:
    """Return the clipping of these parameters' gradients. Those that have no gradient in a step are left out."""
    are_plain = {type(each) for each in parameters} <= {nn.Parameter, Tensor}
    are_alike = len({(each.device, each.dtype) for each in parameters}) == 1
    return partial(_clip_alike, parameters) if are_plain and are_alike else GradientClipping(parameters)


@torch.no_grad()
def _clip_alike(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradients of plain parameters of one device and dtype.

    Bit for bit as torch's ``clip_grad_norm_``, without looking the gradients up and grouping them twice, which takes
    longer than these operations where a model is small.
    """
    gradients = _elements(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if max_norm:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


class GradientClipping:
    """Measures and clips the gradients of parameters of any kind. Those that have no gradient in a step are left out.

    How a parameter is sharded is looked up once: at each step, it would cost 2 % of a small one under FSDP.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sharded = [each for each in parameters if isinstance(each, DTensor)]
        self._by_groups = _grouped(parameters, mesh_groups)
        self._by_mesh = _grouped(parameters, _mesh_of)

    def __call__(self, max_norm: float) -> Tensor:
        """Clip the gradients to a total L2 norm of ``max_norm`` (0: no clipping). Returns the norm before it, 0-dim.
        Collective if gradients are sharded."""
        norm = self.norm()
        if max_norm:
            self.clip(max_norm, norm)
        return norm

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients, 0-dim; of full tensors, but under a pipeline of this rank's stages only.
        Collective if gradients are sharded."""
        for parameter in self._sharded:
            if parameter.grad is not None:
                complete(parameter, parameter.grad)
        gradients = {groups: found for groups, alike in self._by_groups.items() if (found := _elements(alike))}
        if len(gradients) < 2:
            norm = torch.nn.utils.get_total_norm([*chain.from_iterable(gradients.values())])
            return norm.full_tensor() if isinstance(norm, DTensor) else norm  # reduces the norms of the shards
        norms = [torch.nn.utils.get_total_norm(map(dense, each)) for each in gradients.values()]
        wide = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in norms]
        return summed(torch.stack(wide).square(), [groups or () for groups in gradients]).sum().sqrt()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
        for alike in self._by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def complete(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Sum a gradient that is spread as partial sums, as that of a norm under sequence parallelism is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _grouped(parameters: Iterable[nn.Parameter], kind: Callable[[DTensor], K]) -> dict[K | None, list[nn.Parameter]]:
    """Group the parameters by a property; None: those that are not DTensors."""
    groups: dict[K | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(kind(parameter) if isinstance(parameter, DTensor) else None, []).append(parameter)
    return groups


def _mesh_of(parameter: DTensor) -> DeviceMesh:
    return parameter.device_mesh


def _elements(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; for sparse ones (``nn.Embedding(sparse=True)``), their coalesced values."""
    elements: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        elements.append(gradient)
    return elements
