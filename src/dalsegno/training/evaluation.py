"""Evaluation: how the model is measured on one set of data: by its mean loss, or by a function of the user's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import torch

from dalsegno.data import EvalLoader, to_device
from dalsegno.data.step_batch import LossWeight, iter_steps
from dalsegno.distributed import accelerator
from dalsegno.distributed.eval_mode import evaluating
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful

from .forward import EvaluationForward
from .parts import RunParts

BetweenBatches = Callable[[], None]
"""Called between two batches of an evaluation, equally often on all ranks. An exception that it raises interrupts the
evaluation."""


class Evaluation(Protocol):
    """One evaluation set, and how the model is measured on it: :class:`LossEvaluation` or :class:`UserEvaluation`."""

    @property
    def name(self) -> str: ...

    @property
    def affected(self) -> Sequence[Stateful]:
        """Objects, besides callbacks, whose state it may change."""

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """The metrics by the names under which they are logged, reduced over all ranks. Collective."""


class LossEvaluation:
    """Metrics ``<prefix>_loss``, ``_runtime``, ``_samples_per_second``: over all ranks, each sample once.

    The prefix is ``eval`` for the only set, ``eval_<name>`` if there are several.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        loader: EvalLoader,
        *,
        parts: RunParts,
        forward: EvaluationForward,
        device: torch.device,
        loss_weight: LossWeight | None,
        affected: Sequence[Stateful],
    ) -> None:
        self.name, self.affected = name, affected
        self._prefix = prefix
        self._loader = loader
        self._dispatcher = parts.dispatcher
        self._forward = forward
        self._layout = parts.layout
        self._device = device
        self._loss_weight = loss_weight

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """Run the model over the whole set, in evaluation mode. Collective."""
        began = time.monotonic()
        with self._loader.evaluated(), evaluating(*self._forward.modules):
            loss_sum, weight, samples = self._sums(between_batches)
        seconds = time.monotonic() - began
        (loss_sum,) = self._layout.sum_floats([loss_sum], "the loss of an evaluation")
        return {
            f"{self._prefix}_loss": loss_sum / weight if weight else float("nan"),
            f"{self._prefix}_runtime": seconds,
            f"{self._prefix}_samples_per_second": samples / seconds,
        }

    def _sums(self, between_batches: BetweenBatches) -> tuple[float, float, int]:
        """This rank's weighted sum of losses; the weights and the samples of all ranks."""
        dispatcher, weight, samples = self._dispatcher, 0.0, 0
        losses: list[torch.Tensor] = []
        for index, step_batch in enumerate(iter_steps(self._loader, repeat(1), self._layout, self._loss_weight)):
            between_batches()
            batch = to_device(step_batch.microbatches[0].batch, self._device)
            loss, outputs = self._forward(batch)
            if step_batch.weights[0]:  # padding does not count, not even a NaN
                losses.append(accelerator.wide(loss) * step_batch.weights[0])
            if dispatcher.prediction_step:
                dispatcher.prediction_step.fill(batch, outputs, index, step_batch.microbatches[0].samples)
                dispatcher.prediction_step.fire()
            weight += step_batch.total
            samples += step_batch.samples
        return float(torch.stack(losses).sum()) if losses else 0.0, weight, samples


class UserEvaluation:
    """The argument ``evaluate`` of ``dalsegno.Run``."""

    name = "eval"
    affected: Sequence[Stateful] = ()

    def __init__(self, function: Callable[[], Mapping[str, float]]) -> None:
        self._function = function

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """``between_batches`` is not called here: the function calls ``run.between_batches()``.

        Raises:
            ConfigurationError: if the function does not return numbers by name.
        """
        metrics: Any = self._function()
        try:
            return {str(name): _plain(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f'evaluate= returned {metrics!r}; it must return numbers by name: {{"eval_loss": 0.7}}'
            ) from error


def _plain(value: Any) -> float:
    """A Python number from a number, or from a tensor or an array of one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"{number!r} is not a number")
    return number
