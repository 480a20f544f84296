"""Measured: what OLMo-core's trainer reports of a run: its progress, and the metrics that callbacks record."""

from __future__ import annotations

from typing import Any

from dalsegno.events.contexts import (
    Context,
    ExceptionContext,
    LogContext,
    MicrobatchBeginContext,
    StepDoneContext,
    StepEndContext,
    TrainEndContext,
)
from dalsegno.interop.progress import Progress

from .recorded import Recorded


class Measured(Progress):
    """Handles each event before OLMo-core's callbacks do."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.recorded = Recorded()
        self.has_batch = False
        """Whether a step is in progress whose batch is loaded: OLMo-core counts it then."""
        self._is_between = True  # steps and evaluations

    def record(self, name: str, value: Any, reduction: str, merge: str) -> None:
        """Keep a metric for the record of this step; outside of steps, for one of its own."""
        if self._is_between and not self.in_evaluation:
            self.collected.add({name: value})
        else:
            self.recorded.add(name, value, reduction, merge)

    def on_step_begin(self, ctx: Context) -> None:
        super().on_step_begin(ctx)
        self._is_between = False
        self.recorded.clear()

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        super().on_microbatch_begin(ctx)
        self.has_batch = True

    def on_step_end(self, ctx: StepEndContext) -> None:
        super().on_step_end(ctx)
        self.has_batch = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind in ("train", "eval"):
            self.recorded.move_into(ctx)

    def on_step_done(self, ctx: StepDoneContext) -> None:
        super().on_step_done(ctx)
        self._is_between = True

    def on_exception(self, ctx: ExceptionContext) -> None:
        super().on_exception(ctx)
        self._end()

    def on_train_end(self, ctx: TrainEndContext) -> None:
        super().on_train_end(ctx)
        self._end()

    def _end(self) -> None:
        self.recorded.clear()
        self.has_batch, self._is_between = False, True
