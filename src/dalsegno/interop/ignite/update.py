"""Update: the optimizer step of an Ignite trainer's function, observed through the optimizer's hooks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dalsegno.interop.leg import Leg


class Update:
    """Fires what happens in one step, between its first batch and its end.

    Args:
        model: whose gradients are clipped.
        optimizer: whose hooks fire.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.lr: float | None = None
        """That the newest update used."""
        self._model, self._optimizer = model, optimizer
        self._leg: Leg | None = None  # while training runs
        self._installed = ExitStack()
        self.begin_step()

    def begin_step(self) -> None:
        self.grad_norm: torch.Tensor | None = None
        """Total norm of this step's gradients before clipping."""
        self.is_done = False
        """Whether the weights were updated in this step."""
        self._is_ready = False  # on_gradients_ready has fired

    def install(self, leg: Leg) -> None:
        """Fire the leg's events, until :meth:`remove`."""
        self._leg = leg
        self._installed.callback(self._optimizer.register_step_pre_hook(self._before).remove)
        self._installed.callback(self._optimizer.register_step_post_hook(self._after).remove)

    def remove(self) -> None:
        self._installed.close()
        self._leg = None

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients, and return their norm before."""
        self._gradients_ready()
        self.grad_norm = norm = nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type)
        return norm

    def _gradients_ready(self) -> None:
        if self._leg is not None and not self._is_ready:
            self._is_ready = True
            self._leg.events.gradients_ready.fire_with()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.lr = float(optimizer.param_groups[0]["lr"])
        self._gradients_ready()
        if self._leg is not None:
            self._leg.events.pre_optimizer_step.fire_with(self.grad_norm)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.is_done = True
        if self._leg is not None:
            self._leg.events.optimizer_step.fire_with()
