"""StepLog: the records of a run, and the numbers that they are made of.

Each record fires on_log_step, whose handlers may add to it, then on_log, whose handlers write it.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered
from dalsegno.events.table import Event

from .run_parts import RunParts

logger = logging.getLogger("dalsegno")


class StepLog:
    """Adds up what each step reports, and makes records of it. Lives as long as the run's parts."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._metrics = parts.metrics
        self._sums = Gathered(parts.metrics.sums, "the loss of a record")
        self.begin_leg()

    def begin_leg(self) -> None:
        """Forget the learning rate and the warnings of the previous leg."""
        self._lr: float | torch.Tensor | None = None  # of the newest update
        self._listens_to_metrics = self._dispatcher.listens_anywhere(Event.TRAIN_METRICS)
        self._broken_since: int | None = None  # first of the last records whose loss was NaN or infinite
        self._has_warned = False
        self.forget_gathered()

    @property
    def gathered(self) -> list[Gathered]:
        """What a training record needs of every rank."""
        return [self._sums, *self._dispatcher.gathered]

    def forget_gathered(self) -> None:
        """Drop what has been fetched for a record that is not made."""
        for each in self.gathered:
            each.forget()

    def add_step(
        self, loss: torch.Tensor, grad_norm: torch.Tensor | None, lr: float | torch.Tensor | None, tokens: int
    ) -> None:
        """Count a finished step: this rank's share of its loss and tokens, the global gradient norm, and the learning
        rate that it used."""
        self._metrics.add(loss, grad_norm, tokens)
        self._lr = lr

    def report_step(self, loss: torch.Tensor, grad_norm: torch.Tensor | None, tokens: int) -> None:
        """Fire on_train_metrics if a callback on any rank handles it: the one event that costs a reduction and a device
        sync at each step. Collective.

        ``loss`` and ``tokens`` are this rank's."""
        if not self._listens_to_metrics:
            return
        total_loss, total_tokens = self._parts.layout.sum_floats([float(loss), tokens], "the loss of a step")
        metrics: dict[str, Any] = {"loss": total_loss}
        if total_tokens:
            metrics["tokens"] = int(total_tokens)
        if grad_norm is not None:
            metrics["grad_norm"] = float(grad_norm)
        if self._lr is not None:
            metrics["learning_rate"] = float(self._lr)
        self._dispatcher.train_metrics.fire_with(metrics)

    def log_training(self) -> None:
        """Log the steps since the last such record. Collective, unless :attr:`gathered` has been fetched."""
        logs: dict[str, Any] = self._metrics.start_over(self._sums.by_rank())
        if self._lr is not None:
            logs["learning_rate"] = float(self._lr)
        if self._metrics.run_tokens:
            self._state.num_input_tokens_seen = logs["tokens"] = self._metrics.run_tokens
        loss = logs.get("loss", 0.0)
        self._dispatcher.fire_record(logs, "train")
        self._check_loss(loss)

    def final_metrics(self) -> dict[str, Any]:
        """Totals of the run, for the record at its end. Collective."""
        state, seconds = self._state, self._state.elapsed()
        metrics: dict[str, Any] = {
            "train_runtime": seconds,
            "train_samples": state.samples_seen,
            "train_samples_per_second": state.samples_seen / seconds,
            "train_steps_per_second": state.global_step / seconds,
            "step": state.global_step,
        }
        microbatch = self._parts.loader.samples_per_microbatch()
        if microbatch is not None:
            metrics["effective_batch_size"] = microbatch * self._parts.args.accumulation.at(
                max(state.global_step, 1) - 1
            )
        loss = self._metrics.run_loss()
        if loss is not None:
            metrics["train_loss"] = loss
            self._check_final_loss(loss)
        return metrics

    def _check_loss(self, loss: float) -> None:
        if math.isfinite(loss):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = self._state.global_step
            if not self._parts.control.should_training_stop:
                self._warn(
                    f"the loss is {loss} in the record of step {self._broken_since}; CheckLoss() ends such a run"
                )

    def _check_final_loss(self, loss: float) -> None:
        if math.isfinite(loss) or self._parts.control.should_training_stop:
            return
        if self._broken_since is not None:
            since = f"since the record of step {self._broken_since}"
            self._warn(f"the run is at its end, but the loss has been NaN or infinite {since}: look at the weights")
        elif not self._has_warned:
            self._warn(f"the run is at its end, but the mean loss of its steps is {loss}: look at the weights")

    def _warn(self, text: str) -> None:
        self._has_warned = True
        if collectives.rank() == 0:
            logger.warning("%s", text)
