"""Loss and gradient norm of a step over all ranks, and clipping, for plain tensors and those sharded over any meshes.

Both are computed on this rank's shards. torch's ``clip_grad_norm_`` refuses to mix tensors of different meshes, or
DTensors and plain tensors, which tensor parallelism has; and an operator takes longer on DTensors than on their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dalsegno.distributed.sharded_tensors import complete, dense, mesh_groups
from dalsegno.distributed.stage_places import is_on_other_stage, place_of


class GradientClipping:
    """Measures and clips the gradients of parameters of any kind. Those that have no gradient in a step are left out.

    How parameters are sharded is looked up once: at each step, it would cost 2 % of a small one under FSDP. So are
    their devices and dtypes: torch groups the gradients twice, which takes longer than to clip those of a small model.
    Plain gradients of one device and dtype are clipped bit for bit as by torch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        alike: dict[tuple[tuple[ProcessGroup, ...], torch.device, torch.dtype], list[nn.Parameter]] = {}
        for each in parameters:
            alike.setdefault((mesh_groups(each), each.device, each.dtype), []).append(each)
        self._parameters = list(alike.values())
        self._groups = [groups for groups, *_ in alike]

    @torch.no_grad()
    def __call__(self, max_norm: float) -> Tensor:
        """Clip the gradients to a total L2 norm of ``max_norm`` (0: no clipping). Returns the norm before it, 0-dim.
        Collective if parameters are sharded."""
        gradients = [*map(_local_gradients, self._parameters)]
        norm = self._norm(gradients)
        if max_norm:
            _scale(gradients, max_norm, norm)
        return norm

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients, 0-dim. Collective if parameters are sharded."""
        return self._norm([*map(_local_gradients, self._parameters)])

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
        _scale(map(_local_gradients, self._parameters), max_norm, norm)

    def _norm(self, gradients: Sequence[list[Tensor]]) -> Tensor:
        norms: list[Tensor] = []
        shared: list[tuple[ProcessGroup, ...]] = []
        for alike, some, groups in zip(self._parameters, gradients, self._groups, strict=True):
            if some:
                norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(some))))
                shared.append(groups)
            elif groups:  # the other ranks may have gradients though this one has none
                norms.append(torch.zeros((), device=alike[0].device))
                shared.append(groups)
        if not norms:
            return torch.tensor(0.0)
        if len(norms) == 1 and not shared[0]:
            return norms[0]
        wide = [norm.to(norms[0].device, torch.promote_types(norm.dtype, torch.float32)) for norm in norms]
        return _summed(torch.stack(wide).square(), shared).sqrt()


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients; of sparse ones (``nn.Embedding(sparse=True)``), the coalesced values."""
    found: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if type(gradient) is not Tensor:  # faster than to ask whether each is a DTensor
            completed = complete(parameter, gradient)
            if completed is not gradient:
                parameter.grad = completed
            gradient = dense(completed)
        elif gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        found.append(gradient)
    return found


def _summed(squares: Tensor, kinds: Sequence[tuple[ProcessGroup, ...]]) -> Tensor:
    """Sum squared norms, one for each kind of tensors, over the process groups that these are sharded over, and add
    them up. One collective for each of these groups: the ranks of another pipeline stage, which have other tensors,
    take no part."""
    for group in dict.fromkeys(chain.from_iterable(kinds)):
        members = torch.tensor([number for number, its in enumerate(kinds) if group in its], device=squares.device)
        part = squares[members]
        dist.all_reduce(part, group=group)
        squares[members] = part
    return squares.sum()


def _scale(gradients: Iterable[list[Tensor]], max_norm: float, norm: Tensor) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for some in gradients:
        if some:
            torch._foreach_mul_(some, factor.to(some[0].device))


# --- loss and gradient norm of a step, over all ranks that hold parts of one model ----------------------------------


StepTotals = Callable[[Tensor, float | None], tuple[Tensor, Tensor | None]]
"""Clips the gradients of a step, after its last backward pass. Collective if the model is sharded or cut into stages.

Of the loss of the parts of the model that this rank has (0-dim) and the total L2 norm to which gradients are clipped
(0: not clipped; None: not even measured), it makes the loss of the whole model, and the norm before clipping.
"""


def totals_of_whole(clip: Callable[[float], Tensor]) -> StepTotals:
    """Return the totals of a model whose loss every rank has; ``clip`` returns the norm of the gradients."""

    def totals(loss: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        return loss, None if max_norm is None else clip(max_norm)

    return totals


class StageTotals:
    """Totals of a model that is cut into pipeline stages, of which the last one has the loss; elsewhere it is zero.

    The stages sum both in one collective, which clipping needs anyway. So every rank has the loss of every step, for
    records, checkpoints and handlers, and it costs nothing.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stages: ProcessGroup, device: torch.device) -> None:
        places = [(each, place_of(each)) for each in parameters if not is_on_other_stage(each)]
        self._clipping = GradientClipping(each for each, _ in places)
        # A parameter that several stages share counts once.
        self._counted = GradientClipping(each for each, place in places if place is None or place.counts)
        self._stages = stages
        self._device = device

    def __call__(self, loss: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        if max_norm is None:
            return self._summed(loss), None
        square = self._counted.norm().square().to(self._device)
        total, square = self._summed(torch.stack([loss, square])).unbind()  # in the wider dtype of the two
        norm = square.sqrt()
        if max_norm:
            self._clipping.clip(max_norm, norm)
        return total.to(loss.dtype), norm

    def _summed(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._stages)
        return values
