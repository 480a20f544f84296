"""DivergenceDetector and CheckLoss: stop a run that has diverged, or roll it back."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from dalsegno.analysis.divergence import DetectorSettings, Divergence, DivergenceState, Mode
from dalsegno.callbacks.argument_checks import flag, one_of, text
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import ConfigurationError
from dalsegno.events import Callback, Event, contexts

logger = logging.getLogger("dalsegno")


class DivergenceCallback(Callback):
    """Does what ``action`` names: ``"rollback"`` goes back to a checkpoint, any other ends the run."""

    def __init__(self, action: str) -> None:
        self._action = action

    def on_init_end(self, ctx: contexts.Context) -> None:
        if self._action == "rollback" and not ctx.control.can_roll_back:
            raise ConfigurationError(
                f"{self.key}(action='rollback') needs TrainingArguments(recovery=RecoveryPolicy(…))"
            )

    def end_or_roll_back(self, ctx: contexts.Context, reason: str, *, save: bool = False) -> None:
        """Request the action. ``save``: save a checkpoint before the run ends."""
        if self._action == "rollback":
            ctx.control.roll_back(reason)
        else:
            ctx.control.stop(reason, save=save, diverged=True)


class DivergenceDetector(DivergenceCallback):
    """Stops training, or rolls it back, when a logged metric diverges, as :class:`Divergence` defines it.

    A metric that is NaN or infinite stops training at once, and always without a checkpoint: the checkpoint would
    contain broken weights. An infinite gradient norm is ignored while the weights are finite: the fp16 gradient scaler
    skips such steps, among them often the first ones.

    Args:
        smoothing: weight of the newest observation in the moving average, 0 < a ≤ 1.
        threshold: an observation is bad from this distance between average and best average, in the metric's unit; or
            None.
        relative_threshold: an observation is bad from this multiple (above 1) of the best average; or None. If both
            thresholds are None, it is bad if a quarter of the gain since the beginning is lost, and more than noise
            explains.
        patience: number of consecutive bad observations that stops training.
        warmup: number of observations at the run's beginning that are not judged. NaN and infinity always are.
        action: ``"stop"`` saves a checkpoint, ``"abort"`` does not; NaN and infinity never save one. ``"rollback"``
            goes back to a checkpoint, chosen by the run's ``RecoveryPolicy``.
        use_eval_loss: watch ``eval_loss`` in evaluation records instead of ``loss`` in training records.
        metric_key: another metric to watch; if its name begins with ``eval_``, in evaluation records.
        mode: ``"max"`` for a metric that should rise, such as an accuracy.
        baseline_smoothing: weight of the newest observation in a second, slower moving average. The first average is
            compared with that one instead of with its best, so that a slow rise is tolerated. Below ``smoothing``; or
            None.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = DivergenceState

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = None,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort", "rollback"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        mode: Mode = "min",
        baseline_smoothing: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if action not in ("stop", "abort", "rollback"):
            raise ConfigurationError(f"action is {action!r}; allowed: 'stop', 'abort' or 'rollback'")
        flag("DivergenceDetector", "use_eval_loss", use_eval_loss)
        if metric_key is not None:
            text("DivergenceDetector", "metric_key", metric_key)
        super().__init__(action)
        self.name = name
        self._metric = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self._kind = "eval" if use_eval_loss or self._metric.startswith("eval_") else "train"
        settings = DetectorSettings(
            smoothing=smoothing,
            threshold=threshold,
            relative_threshold=relative_threshold,
            patience=patience,
            warmup=warmup,
            mode=mode,
            baseline_smoothing=baseline_smoothing,
        )
        self._divergence = Divergence(settings)
        self.needs_evaluations = self._kind == "eval"
        self.reads_nonfinite_loss = self._metric == "loss"
        self._warned_missing = False

    def on_log(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != self._kind:
            return
        if self._metric not in ctx.logs:
            if not self._warned_missing:
                self._warned_missing = True
                text = "%s: no %r in the %s record of step %d (it has %s); such records are ignored"
                known = ", ".join(ctx.logs) or "nothing"
                logger.warning(text, self.key, self._metric, self._kind, ctx.state.global_step, known)
            return
        value = float(ctx.logs[self._metric])
        is_number = math.isfinite(value)
        if not is_number and "grad_norm" in self._metric and are_finite(ctx.model):
            return  # fp16: the gradient scaler skipped that step, as it does until it has found its scale
        verdict = self._divergence.observe(value)
        if verdict.diverged:
            reason = f"{self._metric} diverged at step {ctx.state.global_step}: {verdict.reason}"
            self.end_or_roll_back(ctx, reason, save=is_number and self._action == "stop")

    def state_dict(self) -> dict[str, Any]:
        return self._divergence.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._divergence.load_state_dict(state)


class CheckLoss(DivergenceCallback):
    """Stops training, without a checkpoint, once a micro-batch's loss is NaN or infinite.

    The stop reason names the first such micro-batch, its step and its rank. Each loss is checked on its device; the
    result is read at steps with a record and before each save only. Padding is not checked.

    Args:
        action: ``"abort"`` stops training; ``"rollback"`` goes back to a checkpoint, chosen by the run's
            ``RecoveryPolicy``.
    """

    background_safe = False

    def __init__(self, action: Literal["abort", "rollback"] = "abort") -> None:
        super().__init__(one_of("CheckLoss", "action", action, ("abort", "rollback")))
        self._first: tuple[Tensor, Tensor, Tensor] | None = None
        """Step (0: none so far), micro-batch and value of the first non-finite loss; 0-dim, on the device."""

    def requesting_events(self) -> Collection[Event]:
        return Event.LOG_STEP, Event.BEFORE_SAVE

    def on_train_begin(self, ctx: contexts.Context) -> None:
        self._first = None

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        if not ctx.samples:
            return
        loss: Tensor = ctx.outputs["loss"].detach().float()
        if self._first is None:
            nothing = torch.zeros((), dtype=torch.long, device=loss.device)
            self._first = nothing, nothing, loss
        step, index, value = self._first
        is_first = (step == 0) & ~loss.isfinite()
        self._first = (
            torch.where(is_first, ctx.state.global_step + 1, step),
            torch.where(is_first, ctx.index, index),
            torch.where(is_first, loss, value),
        )

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            self._judge(ctx)

    def _judge(self, ctx: contexts.Context) -> None:
        """Stop if any rank has a non-finite loss. Collective."""
        own = [0.0, 0.0, 0.0]
        if self._first is not None:
            own = torch.stack([accelerator.wide(each) for each in self._first]).tolist()
        found = enumerate(collectives.gather_floats(own, "CheckLoss"))
        broken = sorted((step, rank, index, value) for rank, (step, index, value) in found if step)
        if broken:
            step, rank, index, value = broken[0]
            where = f"micro-batch {index:.0f} (from 0) of step {step:.0f} on rank {rank}"
            self.end_or_roll_back(ctx, f"the loss is {value} in {where}")

    on_before_save = _judge
