"""StepTotals: loss and gradient norm of a step, over all ranks that hold parts of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .clipping import GradientClipping
from .stage_places import is_elsewhere, place_of


class StepTotals(Protocol):
    """Clips the gradients of a step. Called after its last backward pass."""

    def __call__(self, loss: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        """Collective if the model is sharded or cut into stages.

        Args:
            loss: of the parts of the model that this rank has, 0-dim.
            max_norm: total L2 norm to which the gradients are clipped; 0: not clipped; None: not even measured.

        Returns:
            The loss of the whole model, and the norm of its gradients before clipping, both 0-dim.
        """


def totals_of_whole(clip: Callable[[float], Tensor]) -> StepTotals:
    """Return the totals of a model whose loss every rank has; ``clip`` returns the norm of the gradients."""

    def totals(loss: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        return loss, None if max_norm is None else clip(max_norm)

    return totals


class StageTotals:
    """Totals of a model that is cut into pipeline stages, of which the last one has the loss.

    The stages sum both in one collective, which clipping needs anyway. So every rank has the loss of every step, for
    records, checkpoints and handlers, and it costs nothing.

    Args:
        parameters: of the whole model.
        stages: the ranks that have the other stages.
        device: of this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stages: ProcessGroup, device: torch.device) -> None:
        places = [(each, place_of(each)) for each in parameters if not is_elsewhere(each)]
        self._clipping = GradientClipping(each for each, _ in places)
        # A parameter that several stages share counts once.
        self._counted = GradientClipping(each for each, place in places if place is None or place.counts)
        self._stages = stages
        self._device = device

    def __call__(self, loss: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
        """See :class:`StepTotals`; ``loss`` is zero on the ranks that do not have the last stage."""
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
