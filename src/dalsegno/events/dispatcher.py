"""Dispatcher: one channel for each event, its handlers bound once, when the callbacks are set.

A loop asks before it fires, so that an event nobody listens to costs the look at an empty list, about 10 ns, and what
the event says is put together only for somebody::

    if on.step_done:
        on.step_done.fill(step=12)
        on.step_done.fire()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from dalsegno.errors import EventNotFired, UnknownName
from dalsegno.state import Handler, method_of

from . import contexts
from .callback import Callback
from .contexts import Context, PlainContext
from .registration import check_callbacks
from .table import Event

P = ParamSpec("P")
C = TypeVar("C", bound=Context)
K = TypeVar("K", bound=Callback)


_AT_EACH_STEP = frozenset(
    event for event in list(Event)[list(Event).index(Event.STEP_BEGIN) : list(Event).index(Event.LOG_STEP)]
) | {Event.STEP_DONE}


class HandlerList(list[Handler], Generic[P, C]):
    """An event's handlers, in order, and the one context that they are all given. Empty means: nobody listens."""

    __slots__ = ("context", "event", "fill")

    fill: Callable[P, None]
    """Puts this firing's payload into the context."""

    def __init__(self, event: Event, context: C, fill: Callable[P, None]) -> None:
        super().__init__()
        self.event = event
        self.context = context
        self.fill = fill

    def fire(self) -> None:
        """Call the handlers. What one raises goes up, with a note that names callback and event."""
        context = self.context
        control = context.control
        outer = control.current_handler  # of the event in whose handler this one is fired
        handler: Handler | None = None
        try:
            for handler in self:
                control.current_handler = handler
                if (answer := handler(context)) is not None:
                    control.merge_from(answer)
        except BaseException as error:
            if handler is not None:
                error.add_note(f"raised in {method_of(handler, self.event.handler)}")
            raise
        finally:
            control.current_handler = outer

    def fire_all(self) -> list[BaseException]:
        """As :meth:`fire`, but one that raises keeps no other from being called; what they raised is returned."""
        failures: list[BaseException] = []
        control = self.context.control
        outer = control.current_handler
        for handler in self:
            control.current_handler = handler
            try:
                handler(self.context)
            except BaseException as error:
                error.add_note(f"raised in {method_of(handler, self.event.handler)}")
                failures.append(error)
        control.current_handler = outer
        return failures


class Dispatcher:
    """The channels, in the table's order, and the callbacks behind them."""

    def __init__(
        self,
        surroundings: Callable[[type[Context]], Context],
        *,
        is_rank_zero: bool = True,
        unfired: Mapping[Event, str] | None = None,
    ) -> None:
        """
        Args:
            surroundings: makes a context of a given class.
            is_rank_zero: whether handlers run here that run on rank 0 only.
            unfired: the events that this loop cannot fire, with who cannot, and what to do, in words.
        """
        self._surroundings = surroundings
        self._is_rank_zero = is_rank_zero
        self._unfired = dict(unfired or {})
        self._companions: dict[Any, Callback] = {}
        self.callbacks: list[Callback] = []
        self.channels: dict[Event, HandlerList[Any, Any]] = {}

        self.init_end = self._channel(Event.INIT_END, contexts.PlainContext.fill)
        self.before_load = self._channel(Event.BEFORE_LOAD, contexts.BeforeLoadContext.fill)
        self.load = self._channel(Event.LOAD, contexts.LoadContext.fill)
        self.train_begin = self._channel(Event.TRAIN_BEGIN, contexts.TrainBeginContext.fill)
        self.epoch_begin = self._channel(Event.EPOCH_BEGIN, contexts.EpochContext.fill)
        self.step_begin = self._channel(Event.STEP_BEGIN, contexts.PlainContext.fill)
        self.microbatch_begin = self._channel(Event.MICROBATCH_BEGIN, contexts.MicrobatchBeginContext.fill)
        self.before_forward = self._channel(Event.BEFORE_FORWARD, contexts.BeforeForwardContext.fill)
        self.after_forward = self._channel(Event.AFTER_FORWARD, contexts.AfterForwardContext.fill)
        self.before_backward = self._channel(Event.BEFORE_BACKWARD, contexts.BackwardContext.fill)
        self.after_backward = self._channel(Event.AFTER_BACKWARD, contexts.BackwardContext.fill)
        self.microbatch_end = self._channel(Event.MICROBATCH_END, contexts.MicrobatchEndContext.fill)
        self.gradients_ready = self._channel(Event.GRADIENTS_READY, contexts.PlainContext.fill)
        self.pre_optimizer_step = self._channel(Event.PRE_OPTIMIZER_STEP, contexts.PreOptimizerStepContext.fill)
        self.optimizer_step = self._channel(Event.OPTIMIZER_STEP, contexts.PlainContext.fill)
        self.step_skipped = self._channel(Event.STEP_SKIPPED, contexts.StepSkippedContext.fill)
        self.before_zero_grad = self._channel(Event.BEFORE_ZERO_GRAD, contexts.PlainContext.fill)
        self.after_zero_grad = self._channel(Event.AFTER_ZERO_GRAD, contexts.PlainContext.fill)
        self.before_scheduler_step = self._channel(Event.BEFORE_SCHEDULER_STEP, contexts.SchedulerContext.fill)
        self.after_scheduler_step = self._channel(Event.AFTER_SCHEDULER_STEP, contexts.SchedulerContext.fill)
        self.step_end = self._channel(Event.STEP_END, contexts.StepEndContext.fill)
        self.train_metrics = self._channel(Event.TRAIN_METRICS, contexts.MetricsContext.fill)
        self.log_step = self._channel(Event.LOG_STEP, contexts.LogContext.fill)
        self.log = self._channel(Event.LOG, contexts.LogContext.fill)
        self.evaluate_begin = self._channel(Event.EVALUATE_BEGIN, contexts.EvaluateBeginContext.fill)
        self.prediction_step = self._channel(Event.PREDICTION_STEP, contexts.PredictionStepContext.fill)
        self.evaluate_end = self._channel(Event.EVALUATE_END, contexts.EvaluateEndContext.fill)
        self.evaluate = self._channel(Event.EVALUATE, contexts.EvaluateContext.fill)
        self.predict = self._channel(Event.PREDICT, contexts.MetricsContext.fill)
        self.before_save = self._channel(Event.BEFORE_SAVE, contexts.BeforeSaveContext.fill)
        self.save = self._channel(Event.SAVE, contexts.SaveContext.fill)
        self.step_done = self._channel(Event.STEP_DONE, contexts.StepDoneContext.fill)
        self.epoch_end = self._channel(Event.EPOCH_END, contexts.EpochContext.fill)
        self.rollback = self._channel(Event.ROLLBACK, contexts.RollbackContext.fill)
        self.exception = self._channel(Event.EXCEPTION, contexts.ExceptionContext.fill)
        self.train_end = self._channel(Event.TRAIN_END, contexts.TrainEndContext.fill)

    def _channel(self, event: Event, fill: Callable[Concatenate[C, P], None]) -> HandlerList[P, C]:
        context = cast(C, self._surroundings(event.context))
        channel: HandlerList[P, C] = HandlerList(event, context, MethodType(fill, context))
        self.channels[event] = channel
        return channel

    def bind(self, callbacks: Iterable[object]) -> None:
        """Let exactly these callbacks listen, in this order.

        Raises:
            ConfigurationError: if one is not a callback, misspells a handler, or two have one key.
            EventNotFired: if one handles an event that this loop cannot fire.
        """
        checked = check_callbacks(callbacks)
        for callback in checked:
            self._refuse_unfired(callback)
        for channel in self.channels.values():
            channel.clear()
        self.callbacks = []
        for callback in checked:
            self._listen(callback)

    def _listen(self, callback: Callback) -> None:
        handlers = callback.bound_handlers(self)  # on every rank: a companion that comes along may have state
        self.callbacks.append(callback)
        if self._is_rank_zero or callback.ranks == "all":
            for event, handler in handlers:
                self.channels[event].append(handler)

    def shared(self, kind: Callable[[Context], K]) -> K:
        """See :class:`dalsegno.events.callback.Binder`. For callbacks, while they are bound."""
        if kind not in self._companions:
            self._companions[kind] = kind(self._surroundings(PlainContext))
        found = self._companions[kind]
        if found not in self.callbacks:
            self._listen(found)
        return cast(K, found)

    def listens_anywhere(self, event: Event) -> bool:
        """Whether any rank has a handler for it: the same answer on all ranks, so that a collective may hang on it."""
        return any(event in callback.handled_events() for callback in self.callbacks)

    def find(self, key: str) -> Callback:
        """The callback with this key.

        Raises:
            UnknownName: if there is none; the message names the nearest.
        """
        for callback in self.callbacks:
            if callback.key == key:
                return callback
        raise UnknownName("callback", key, [callback.key for callback in self.callbacks])

    def wishes_each_step(self) -> bool:
        """Whether a callback may set a flag of the control at any step; the same answer on all ranks."""
        return any(
            callback.makes_wishes and not _AT_EACH_STEP.isdisjoint(callback.handled_events())
            for callback in self.callbacks
        )

    def _refuse_unfired(self, callback: Callback) -> None:
        for event in callback.handled_events():
            if event in self._unfired:
                raise EventNotFired(f"{callback.key} needs {event.handler}, which {self._unfired[event]}")
