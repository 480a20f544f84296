"""Background: an observer's handlers on a thread of its own, which the training never feels."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.state import Handler
from dalsegno.stateful.component import Stateful
from dalsegno.system.worker import Counts, WhenFull, Worker

from .adapters import adapt
from .callback import Binder, Callback
from .contexts import Context
from .table import Event

logger = logging.getLogger("dalsegno")

PATIENCE = 10.0
"""Seconds that the end of training waits for an observer."""


class Background(Callback):
    """Runs ``callback``'s handlers one after the other on a thread of its own: ``Background(UploadSamples())``.

    A handler is given a snapshot of the context: its numbers, records and ``state`` stay as they were when the event
    fired. Model, optimizer and batches are the living ones. What a handler raises, SystemExit too, is logged and
    counted; handlers may be async. Flags that it sets are not heard, since the step they were meant for is over.
    ``on_train_end`` is waited for, 10 seconds at most; what waits then is dropped, and a call that hangs left alone.

    Args:
        callback: one without state, of ours or of another library.
        queue: calls that may wait.
        when_full: ``"drop_oldest"`` forgets the one that waits longest; ``"block"`` lets the training wait for room.

    Raises:
        ConfigurationError: for a callback with state, which would be saved in the middle of a call; for one whose
            handlers look at the run itself; for a ``queue`` below 1, or another word for ``when_full``.
    """

    makes_wishes = False
    observes = False  # the context of an event that is long over

    def __init__(self, callback: object, queue: int = 1000, when_full: WhenFull = "drop_oldest") -> None:
        observer = adapt(callback)
        if isinstance(observer, Stateful):
            raise ConfigurationError(
                f"Background({observer.key}): it has state, which belongs to a step; its handlers have to keep up"
            )
        if not observer.observes:
            raise ConfigurationError(
                f"Background({observer.key}): such a callback is in the background already, or has to act at once"
            )
        self.__wrapped__ = observer
        self.name, self.ranks = observer.key, observer.ranks
        self._worker = Worker(f"{observer.key}, in the background", queue, when_full)
        self._is_deaf = False

    @property
    def counts(self) -> Counts:
        """Calls that were done, failed, and dropped."""
        return self._worker.counts

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys([*self.__wrapped__.handled_events(), Event.TRAIN_END]))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        handlers = [(event, self._sent(handler)) for event, handler in self.__wrapped__.bound_handlers(binder)]
        return [*handlers, (Event.TRAIN_END, self._finish)]

    def _sent(self, handler: Handler) -> Handler:
        def send(background: Background, ctx: Any) -> None:
            background._worker.submit(partial(background._call, handler, _snapshot(ctx)))

        return MethodType(send, self)

    def _call(self, handler: Callable[[Any], Any], ctx: Any) -> Any:
        before = ctx.control.requests()
        answer = handler(ctx)
        if not self._is_deaf and ctx.control.requests() != before:
            self._is_deaf = True
            logger.warning("%s: it set a flag of the control, which is not heard from there", self._worker.name)
        return answer

    def _finish(self, ctx: Context) -> None:
        self._worker.close(PATIENCE)
        trouble = self.counts.failed or self.counts.dropped
        logger.log(logging.WARNING if trouble else logging.INFO, "%s: %s", self._worker.name, self.counts)


def _snapshot(ctx: Any) -> Any:
    """The context as it is now: what is in it may change as soon as the handler has returned."""
    kept = ctx.copy()
    kept.control = copy.copy(ctx.control)
    for name in ("logs", "metrics", "outputs", "call_args", "call_kwargs"):
        if hasattr(kept, name):
            setattr(kept, name, copy.copy(getattr(kept, name)))
    return kept
