"""InstructLab's dialect: observers that get one ``TrainingContext`` and run in the background.

Each callback has a separate thread, so a slow one delays neither the training nor another callback. The run waits up to
10 seconds for ``on_train_end``. What a callback raises is logged and counted; training continues. A callback with
``state_dict`` and ``load_state_dict`` is called synchronously, on the training thread, so that a checkpoint has its
state after the step.

In addition to the thirteen methods of InstructLab's class, those of its first proposal are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.state import Handler
from dalsegno.stateful.component import Stateful
from dalsegno.system.worker import Counts, Worker

from .base import TrainerCallback
from .context import BatchMetrics, TrainingContext
from .shared_state import SharedState

__all__ = ["DIALECT", "BatchMetrics", "InstructLab", "TrainerCallback", "TrainingContext"]

CLOSE_TIMEOUT = 10.0
"""Seconds for which the end of training waits for a callback."""


class InstructLab(CallbackAdapter):
    """Adapts a ``TrainerCallback`` of InstructLab."""

    dialect = "instructlab"
    packages = ("instructlab", "dalsegno.interop.instructlab")
    bases = ("TrainerCallback",)
    calls = (
        (Event.TRAIN_BEGIN, "on_train_begin"),
        (Event.EPOCH_BEGIN, "on_epoch_begin"),
        (Event.STEP_BEGIN, "on_step_begin"),
        (Event.BEFORE_FORWARD, "on_before_forward"),
        (Event.AFTER_FORWARD, "on_after_forward"),
        (Event.BEFORE_BACKWARD, "on_before_backward"),
        (Event.AFTER_BACKWARD, "on_after_backward"),
        (Event.GRADIENTS_READY, "on_before_optimizer_step"),
        (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"),
        (Event.STEP_END, "on_after_optimizer_step"),
        (Event.STEP_END, "on_optimizer_step"),  # the schedule has moved, gradients are cleared
        (Event.TRAIN_METRICS, "on_step_end"),  # where the loss over all ranks is known
        (Event.LOG, "on_log"),
        (Event.EVALUATE, "on_evaluate"),
        (Event.SAVE, "on_save"),
        (Event.STEP_DONE, "on_step_end"),
        (Event.EPOCH_END, "on_epoch_end"),
        (Event.TRAIN_END, "on_train_end"),
    )
    sets_control_flags = False

    def __init__(self, foreign: object, name: str | None = None) -> None:
        super().__init__(foreign, name)
        self._worker = Worker(f"{self.key}, in the background")

    @property
    def _has_state(self) -> bool:
        return isinstance(self.__wrapped__, Stateful)

    @property
    def counts(self) -> Counts:
        """Numbers of calls that ran, failed, and were dropped."""
        return self._worker.counts

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("context",), ()

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys([*super().handled_events(), Event.TRAIN_END]))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [*super().bound_handlers(binder), (Event.TRAIN_END, self._finish)]

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, function = binder.shared(SharedState), getattr(self.__wrapped__, method)
        run = self._worker.do if self._has_state else self._worker.submit

        def learn(_: Any, ctx: Any) -> None:
            shared.learn(ctx.metrics)

        conditions: dict[Event, Callable[[Any], bool]] = {
            Event.BEFORE_FORWARD: lambda ctx: shared.in_update,
            Event.AFTER_FORWARD: lambda ctx: shared.in_update,
            Event.LOG: lambda ctx: ctx.kind == "train",
        }
        is_due = conditions.get(event, lambda ctx: True)

        def call(_: Any, ctx: Any) -> None:
            if is_due(ctx):
                context = shared.saved_context(ctx) if event is Event.SAVE else shared.context(method)
                run(partial(function, self.converted(context, shared)), method)

        return learn if event is Event.TRAIN_METRICS else call

    def converted(self, context: TrainingContext, shared: SharedState) -> TrainingContext:
        """Return the context in the form in which the methods get it."""
        return context

    def _finish(self, ctx: Any) -> None:
        self._worker.close(CLOSE_TIMEOUT)
        self._worker.report()


DIALECT = InstructLab
