"""Inside: the events inside Hugging Face's steps and evaluations, for which its Trainer has no callback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers

from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.interop.leg import Leg
from dalsegno.interop.wrapping import wrap


class Inside:
    """Wraps methods of one trainer until :meth:`close`.

    Raises:
        ConfigurationError: if a callback handles ``on_gradients_ready``, and a gradient scaler is used: only the
            accelerator's own clipping may unscale the gradients.
    """

    def __init__(self, trainer: transformers.Trainer, leg: Leg) -> None:
        self.grad_norm: torch.Tensor | None = None
        """Total norm of this step's gradients before clipping, over all ranks."""
        self._leg = leg
        self._losses: list[torch.Tensor] = []  # of this step's micro-batches
        self._has_scaler = trainer.accelerator.scaler is not None
        if self._has_scaler and leg.events.listens_anywhere(Event.GRADIENTS_READY):
            raise ConfigurationError(
                "on_gradients_ready: with fp16, gradients are still scaled where the Bridge could show them; use bf16"
            )
        self._wrapped = ExitStack()
        self._wrapped.callback(wrap(trainer, "training_step", self._training_step))
        self._wrapped.callback(wrap(trainer, "evaluation_loop", self._evaluation_loop))
        self._wrapped.callback(wrap(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm))

    def close(self) -> None:
        """Restore the trainer's own methods."""
        self._wrapped.close()

    def begin_step(self) -> None:
        self._losses.clear()
        self.grad_norm = None

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the step's loss, whose sum over the ranks is the mean that is logged."""
        return torch.stack([loss.float() for loss in self._losses]).sum() / collectives.world_size()

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        self._leg.see_batch(inputs)
        loss = original(model, inputs, *args, **named)
        self._losses.append(loss.detach())
        return loss

    def _clip_grad_norm(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not self._has_scaler:
            self._leg.events.gradients_ready.fire_with()
        self.grad_norm = norm = original(*args, **named)
        return norm

    def _evaluation_loop(
        self,
        original: Callable[..., Any],
        dataloader: Any,
        description: str,
        *args: Any,
        metric_key_prefix: str = "eval",
        **named: Any,
    ) -> Any:
        def evaluate() -> Any:
            return original(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **named)

        if description != "Evaluation":
            return evaluate()
        events, name = self._leg.events, metric_key_prefix.removeprefix("eval_")
        events.evaluate_begin.fire_with(name)
        try:
            return evaluate()
        finally:
            events.evaluate_end.fire_with(name)
