"""Composer's dialect: a ``Callback`` whose methods take ``state`` and ``logger``.

:data:`.order.ROWS` is the whole order. A *batch* of Composer's is a step; ``state.batch`` is the micro-batch in
progress. :class:`.shared_state.State` lists what of Composer's state is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event as NativeEvent
from dalsegno.interop.table_adapter import TableAdapter

from .base import Event
from .order import CONDITIONS, ROWS, VALUES
from .shared_state import SharedState

_EVENTS = frozenset(event.value for event in Event)


class Composer(TableAdapter):
    """Adapts a ``Callback`` of Composer."""

    dialect = "composer"
    packages = ("composer", "dalsegno.interop.composer")
    bases = ("Callback", "Serializable")
    rows = ROWS
    leading = ("state", "logger")
    values = VALUES
    conditions = CONDITIONS
    instead = {
        "CheckpointSaver": "set save_steps=, or save=",
        "LoadCheckpoint": "pass load_components= to train()",
        "SpeedMonitor": "use dalsegno.callbacks.RateProfiler",
        "ExportForInferenceCallback": "export the model of a checkpoint: dalsegno checkpoints export",
    }
    silent = (
        *(f"iteration_{part}" for part in ("start", "end", "checkpoint")),
        *("predict_start", "predict_batch_start", "predict_before_forward", "predict_after_forward"),
        *("predict_batch_end", "predict_end"),
    )

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._is_initialised = False
        super().__init__(foreign, name)

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return ((), ()) if method == "post_close" else super().arguments(method)

    def shared_state(self, binder: Binder) -> SharedState:
        return binder.shared(SharedState)

    def _defines(self, method: str) -> bool:
        return super()._defines(method) or (method in _EVENTS and super()._defines("run_event"))

    def method(self, name: str) -> Callable[..., Any]:
        if name in _EVENTS and super()._defines("run_event"):
            theirs = sys.modules.get("composer.core.event")
            event = Event(name) if theirs is None else theirs.Event(name)
            return partial(super().method("run_event"), event)
        return super().method(name)

    def call(self, event: NativeEvent, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        call, close = super().call(event, method, binder), self.method(method)

        def initialise(adapted: Any, ctx: Any) -> None:
            if not self._is_initialised:
                self._is_initialised = True
                call(adapted, ctx)

        special = {"init": initialise, "post_close": lambda adapted, ctx: close()}
        return special.get(method, call)
