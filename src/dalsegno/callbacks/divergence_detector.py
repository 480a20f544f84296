"""DivergenceDetector: stops a run whose loss runs away."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from dalsegno.analysis.stats.divergence import Divergence, DivergenceState, Mode, migrated
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext

from .argument_checks import flag, text

logger = logging.getLogger("dalsegno")


class DivergenceDetector(Callback):
    """Watches a logged metric and ends the training when it has diverged, as :class:`Divergence` defines it.

    A metric that is NaN or infinite ends it at once, and always without a checkpoint: what it would hold are broken
    weights, and a resume would begin with them. A gradient's norm may be infinite as long as the weights are not:
    fp16's scaler skips such steps, the first ones among them.

    Args:
        smoothing: weight of the newest observation in the moving average, 0 < a ≤ 1.
        threshold: bad from this distance between average and best average on, in the metric's unit; or None.
        relative_threshold: bad from this multiple (over 1) of the best average on; or None. Where both are None, bad is
            who has lost a quarter of what was gained since the beginning, and more than noise explains.
        patience: how many bad observations in a row end the training.
        warmup: how many observations, from the run's first on, are not judged. NaN and infinity always are.
        action: ``"stop"`` saves a checkpoint, ``"abort"`` ends without one; so do NaN and infinity.
        use_eval_loss: watch ``eval_loss`` in the evaluation's records in place of ``loss`` in those of training.
        metric_key: another metric to watch; one that begins with ``eval_`` is looked for in evaluation's records.
        mode: ``"max"`` for a metric that should rise, such as an accuracy.
        baseline_smoothing: weight of the newest observation in a second, slower moving average, with which the first
            one is compared in place of its best: a slow rise is forgiven. Under ``smoothing``; or None.
        name: the key of its state in checkpoints; the class's name if None.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    state_version = 2
    state_schema = DivergenceState

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = None,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        mode: Mode = "min",
        baseline_smoothing: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if action not in ("stop", "abort"):
            raise ConfigurationError(f"action is {action!r}; allowed: 'stop' or 'abort'")
        flag("DivergenceDetector", "use_eval_loss", use_eval_loss)
        if metric_key is not None:
            text("DivergenceDetector", "metric_key", metric_key)
        self.name = name
        self._action = action
        self._metric = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self._kind = "eval" if use_eval_loss or self._metric.startswith("eval_") else "train"
        self._divergence = Divergence(
            smoothing=smoothing,
            threshold=threshold,
            relative_threshold=relative_threshold,
            patience=patience,
            warmup=warmup,
            mode=mode,
            baseline_smoothing=baseline_smoothing,
        )
        self.needs_evaluations = self._kind == "eval"
        self._said_missing = False

    def on_log(self, ctx: LogContext) -> None:
        if ctx.kind != self._kind:
            return
        if self._metric not in ctx.logs:
            self._say_missing(ctx)
            return
        value = float(ctx.logs[self._metric])
        is_number = math.isfinite(value)
        if not is_number and "grad_norm" in self._metric and are_finite(ctx.model):
            return  # fp16: the scaler has skipped that step, as it does until it has found its scale
        verdict = self._divergence.observe(value)
        if verdict.diverged:
            reason = f"{self._metric} diverged at step {ctx.state.global_step}: {verdict.reason}"
            ctx.control.stop(reason, save=is_number and self._action == "stop", final=True)

    def state_dict(self) -> DivergenceState:
        return self._divergence.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._divergence.load_state_dict(state)

    def migrate(self, state: Any, from_version: int) -> Any:
        return migrated(state)

    def _say_missing(self, ctx: LogContext) -> None:
        if not self._said_missing:
            self._said_missing = True
            logger.warning(
                "%s: no %r in the %s record of step %d (it has %s); such records are ignored",
                self.key,
                self._metric,
                self._kind,
                ctx.state.global_step,
                ", ".join(ctx.logs) or "nothing",
            )
