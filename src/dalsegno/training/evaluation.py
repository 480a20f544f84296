"""Evaluation: the model's mean loss on one set of data."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dalsegno.data import EvalLoader, to_device
from dalsegno.data.step_batch import LossWeight, iter_steps
from dalsegno.distributed import collectives
from dalsegno.distributed.eval_mode import evaluating
from dalsegno.events.dispatcher import Dispatcher

from .forward import ForwardPass


class LossEvaluation:
    """Metrics ``<prefix>_loss``, ``_runtime``, ``_samples_per_second``: over all ranks, each sample once.

    The prefix is ``eval`` for the only set, ``eval_<name>`` where there are several.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        feed: EvalLoader,
        *,
        on: Dispatcher,
        forward: ForwardPass,
        device: torch.device,
        loss_weight: LossWeight | None,
        between_batches: Callable[[], None],
    ) -> None:
        """``between_batches`` is called before each batch, equally often on all ranks; what it raises goes up."""
        self.name = name
        self._prefix = prefix
        self._feed = feed
        self._on = on
        self._forward = forward
        self._device = device
        self._loss_weight = loss_weight
        self._between_batches = between_batches

    def __call__(self) -> dict[str, float]:
        """Run the model over the whole set, in evaluation mode. Collective."""
        began = time.monotonic()
        self._feed.is_evaluated = True
        try:
            with evaluating(*self._forward.modules):
                loss_sum, weight, samples = self._sums()
        finally:
            self._feed.close()
            self._feed.is_evaluated = False
        seconds = time.monotonic() - began
        (loss_sum,) = collectives.sum_floats([loss_sum], "the loss of an evaluation")
        return {
            f"{self._prefix}_loss": loss_sum / weight if weight else float("nan"),
            f"{self._prefix}_runtime": seconds,
            f"{self._prefix}_samples_per_second": samples / seconds,
        }

    def _sums(self) -> tuple[float, float, int]:
        """This rank's weighted sum of losses; the weights and the samples of all ranks."""
        on, weight, samples = self._on, 0.0, 0
        losses: list[torch.Tensor] = []
        for index, draw in enumerate(iter_steps(self._feed, 1, self._loss_weight)):
            self._between_batches()
            batch = to_device(draw.microbatches[0].batch, self._device)
            loss, outputs = self._forward(batch)
            if draw.weights[0]:  # of padding nothing counts, not even a NaN
                losses.append(loss.double() * draw.weights[0])
            if on.prediction_step:
                on.prediction_step.fill(batch, outputs, index, draw.microbatches[0].samples)
                on.prediction_step.fire()
            weight += draw.total
            samples += draw.samples
        return float(torch.stack(losses).sum()) if losses else 0.0, weight, samples
