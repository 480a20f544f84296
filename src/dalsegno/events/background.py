"""Background: runs an observer's handlers on a thread that training does not wait for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.state import Handler, method_of
from dalsegno.stateful.component import Stateful
from dalsegno.system.worker import Counts, WhenFull, Worker

from .adapters import adapt
from .callback import Binder, FlaglessCallback
from .contexts import Context
from .table import Event

logger = logging.getLogger("dalsegno")

DRAIN_TIMEOUT_S = 10.0
"""Seconds that the end of training waits for the observer's calls."""


class Background(FlaglessCallback):
    """Runs ``callback``'s handlers in order on a background thread: ``Background(UploadSamples())``.

    A handler receives a snapshot of the context: numbers, records and ``state`` keep the values of the firing. Model,
    optimizer and batches are the live objects. What a handler raises, including SystemExit, is logged and counted;
    handlers may be async. Flags that it sets are ignored, because their step is over. The end of training waits up to
    10 seconds for the remaining calls, ``on_train_end`` included; then it drops those that are queued and abandons a
    call that hangs.

    Args:
        callback: a stateless callback, of dalsegno or another library.
        queue: number of calls that may wait.
        when_full: ``"drop_oldest"`` drops the call that has waited longest; ``"block"`` makes training wait for room.

    Raises:
        ConfigurationError: for a callback with state, which could be saved in the middle of a call; for a callback that
            is not ``background_safe`` or has ``on_log_step``; for a ``queue`` below 1, or an unknown ``when_full``.
    """

    background_safe = False  # its handlers already get a snapshot of a past event

    def __init__(self, callback: object, queue: int = 1000, when_full: WhenFull = "drop_oldest") -> None:
        observer = adapt(callback)
        if isinstance(observer, Stateful):
            raise ConfigurationError(
                f"Background({observer.key}): it has state, which is saved with its step; use it without Background"
            )
        if not observer.background_safe:
            raise ConfigurationError(
                f"Background({observer.key}): this callback already runs in the background, or has to act at once"
            )
        if Event.LOG_STEP in observer.handled_events():
            raise ConfigurationError(
                f"Background({observer.key}): on_log_step extends a record, which is written before the background "
                "calls it; use the callback without Background, or on_log to read records"
            )
        self.__wrapped__ = observer
        self.name, self.ranks = observer.key, observer.ranks
        self.needs_events, self.optional_events = observer.needs_events, observer.optional_events
        self.needs_evaluations, self.only_at_evaluations = observer.needs_evaluations, observer.only_at_evaluations
        self.reads_nonfinite_loss = observer.reads_nonfinite_loss
        self._worker = Worker(f"{observer.key}, in the background", queue, when_full)
        self._has_warned = False

    @property
    def counts(self) -> Counts:
        """Numbers of calls that ran, failed and were dropped."""
        return self._worker.counts

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys([*self.__wrapped__.handled_events(), Event.TRAIN_END]))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        handlers = [(event, self._queued(handler, event)) for event, handler in self.__wrapped__.bound_handlers(binder)]
        return [*handlers, (Event.TRAIN_END, self._finish)]

    def _queued(self, handler: Handler, event: Event) -> Handler:
        label = method_of(handler, event.handler).rpartition(".")[2]

        def send(background: Background, ctx: Any) -> None:
            background._worker.submit(partial(background._call, handler, _snapshot(ctx)), label)

        return MethodType(send, self)

    def _call(self, handler: Callable[[Any], Any], ctx: Any) -> Any:
        before = ctx.control.requests()
        answer = handler(ctx)
        if not self._has_warned and ctx.control.requests() != before:
            self._has_warned = True
            logger.warning("%s: it set a flag of the control, which has no effect from there", self._worker.name)
        return answer

    def _finish(self, ctx: Context) -> None:
        self._worker.close(DRAIN_TIMEOUT_S)
        self._worker.report()


def _snapshot(ctx: Any) -> Any:
    """Copy the context with all that may change once the handler has returned."""
    kept = ctx.copy()
    kept.control = copy.copy(ctx.control)
    for name in ("logs", "metrics", "outputs", "call_args", "call_kwargs"):
        if hasattr(kept, name):
            setattr(kept, name, copy.copy(getattr(kept, name)))
    return kept
