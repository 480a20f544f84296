"""OLMo-core's dialect: a ``Callback`` that has the trainer as ``self.trainer``.

:data:`.order.ROWS` is the whole order. A *batch* of OLMo-core's is a step; ``pre_step`` gets its first micro-batch.
:class:`.trainer.Trainer` lists what of OLMo-core's trainer is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.interop.table_adapter import TableAdapter

from .base import Callback
from .order import CONDITIONS, ROWS, VALUES
from .shared_state import SharedState

__all__ = ["DIALECT", "Callback", "OLMoCore"]


class OLMoCore(TableAdapter):
    """Adapts a ``Callback`` of OLMo-core."""

    dialect = "olmo_core"
    packages = ("olmo_core", "dalsegno.interop.olmo_core")
    bases = ("Callback",)
    rows = ROWS
    values = VALUES
    conditions = CONDITIONS
    instead = {
        "CheckpointerCallback": "set save_steps=, or save=",
        "EvaluatorCallback": "pass eval_dataset= to the Trainer",
        "ConsoleLoggerCallback": "use dalsegno.callbacks.ProgressCallback, which every run has",
        "SpeedMonitorCallback": "use dalsegno.callbacks.RateProfiler",
        "BatchSizeSchedulerCallback": "set gradient_accumulation_schedule=",
        "SequenceLengthSchedulerCallback": "set sequence_length_schedule=",
        "SchedulerCallback": "pass lr_scheduler= to the Trainer",
        "ModelMergeCallback": "use dalsegno.callbacks.ModelMerge",
    }

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._is_attached = False
        super().__init__(foreign, name)

    def shared_state(self, binder: Binder) -> SharedState:
        shared = binder.shared(SharedState)
        self.__wrapped__.trainer = shared.trainer  # type: ignore[attr-defined]
        return shared

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        call, shared = super().call(event, method, binder), self.shared_state(binder)

        def attach(adapted: Any, ctx: Any) -> None:
            if not self._is_attached:
                self._is_attached = True
                call(adapted, ctx)

        def saved(adapted: Any, ctx: Any) -> None:
            with shared.trainer.as_of(ctx.state):
                call(adapted, ctx)

        return {"post_attach": attach, "post_checkpoint_saved": saved}.get(method, call)


DIALECT = OLMoCore
