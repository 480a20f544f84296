"""Dispatcher: one list of handlers per event, bound once when the callbacks are set.

The loop checks the list before it fires, so that an event without handlers costs the check of an empty list, about
10 ns, and its payload is only built if there are handlers::

    if on.step_done:
        on.step_done.fill(step=12)
        on.step_done.fire()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from dalsegno.distributed.collectives import Gathered
from dalsegno.errors import CannotSave, ConfigurationError, EventNotFired, UnknownName
from dalsegno.state import Handler, TrainerState, method_of, owner_of

from . import contexts
from .background import Background
from .callback import Callback
from .contexts import Context
from .registration import check_callbacks
from .table import Event

P = ParamSpec("P")
C = TypeVar("C", bound=Context)
K = TypeVar("K", bound=Callback)

_AT_EACH_STEP = {*Event.between(Event.STEP_BEGIN, Event.TRAIN_METRICS), Event.STEP_DONE}
_OF_RECORDS = {Event.LOG_STEP, Event.LOG}
_MUTED = {*Event.between(Event.STEP_BEGIN, Event.STEP_DONE)}
"""Events that a callback which is switched off does not receive. Those that open and close what it uses stay."""


class HandlerList(list[Handler], Generic[P, C]):
    """An event's handlers, in order, and the context that they all receive. It is false if there are none.

    Only :meth:`bind` changes it. It is a list because the truth of one is the cheapest test for "nobody handles this".
    """

    __slots__ = ("_bound", "context", "event", "fill")

    fill: Callable[P, None]
    """Sets the payload of this firing in the context."""

    def __init__(self, event: Event, context: C, fill: Callable[P, None]) -> None:
        super().__init__()
        self.event = event
        self.context = context
        self.fill = fill
        self._bound: tuple[Handler, ...] = ()

    def bind(self, handlers: Iterable[Handler]) -> None:
        """Set the handlers, from the next firing on: one that removes a callback does not change the present firing."""
        self._bound = tuple(handlers)
        self[:] = self._bound

    def fire(self) -> None:
        """Call the handlers. An exception in one propagates, with a note that names callback and event."""
        context = self.context
        control = context.control
        outer = control.handler  # if one fires this event
        try:
            for handler in self._bound:
                control.handler = handler
                if (answer := handler(context)) is not None:
                    control.merge_from(answer)
        except BaseException as error:
            self._name_handler(error)
            raise
        finally:
            control.handler = outer

    def fire_with(self, *payload: P.args, **named: P.kwargs) -> None:
        """Set the payload and call the handlers, if there are any. For payloads that cost nothing to build."""
        if self:
            self.fill(*payload, **named)
            self.fire()

    def fire_all(self) -> list[BaseException]:
        """Like :meth:`fire`, but call all handlers even if some raise, and return the exceptions."""
        failures: list[BaseException] = []
        control = self.context.control
        outer = control.handler
        for handler in self._bound:
            control.handler = handler
            try:
                handler(self.context)
            except BaseException as error:
                self._name_handler(error)
                failures.append(error)
        control.handler = outer
        return failures

    def _name_handler(self, error: BaseException) -> None:
        if (handler := self.context.control.handler) is not None:
            error.add_note(f"raised in {method_of(handler, self.event.handler)}")


class Dispatcher:
    """The handler lists, in the table's order, and the callbacks that they belong to."""

    def __init__(
        self,
        common: Mapping[str, Any],
        *,
        is_rank_zero: bool = True,
        unsupported_events: Mapping[Event, str] | None = None,
    ) -> None:
        """``common``: the fields of :class:`Context`. ``unsupported_events``: those that this loop cannot fire, with
        reason and remedy for the error."""
        self._common = common
        self._is_rank_zero = is_rank_zero
        self._unsupported_events = dict(unsupported_events or {})
        self._shared: dict[Any, Callback] = {}
        self._handlers: list[tuple[Callback, Event, Handler]] = []
        self.switched_off: frozenset[str] = frozenset()
        """Keys of callbacks that are switched off."""
        self._idle: set[tuple[str, Event]] = set()  # keys and events
        self._handled: set[Event] = set()  # on any rank
        self._user_kind = "user"  # of records that the user logs
        self.callbacks: list[Callback] = []
        self.gathered: list[Gathered] = []
        """What handlers of a training record need of every rank."""
        self.channels: dict[Event, HandlerList[Any, Any]] = {}

        self.init_end = self._handler_list(Event.INIT_END, Context)
        self.before_load = self._handler_list(Event.BEFORE_LOAD, contexts.BeforeLoadContext)
        self.load = self._handler_list(Event.LOAD, contexts.LoadContext)
        self.train_begin = self._handler_list(Event.TRAIN_BEGIN, contexts.TrainBeginContext)
        self.epoch_begin = self._handler_list(Event.EPOCH_BEGIN, contexts.EpochContext)
        self.step_begin = self._handler_list(Event.STEP_BEGIN, Context)
        self.microbatch_begin = self._handler_list(Event.MICROBATCH_BEGIN, contexts.MicrobatchBeginContext)
        self.before_forward = self._handler_list(Event.BEFORE_FORWARD, contexts.BeforeForwardContext)
        self.after_forward = self._handler_list(Event.AFTER_FORWARD, contexts.AfterForwardContext)
        self.before_backward = self._handler_list(Event.BEFORE_BACKWARD, contexts.BackwardContext)
        self.after_backward = self._handler_list(Event.AFTER_BACKWARD, contexts.BackwardContext)
        self.microbatch_end = self._handler_list(Event.MICROBATCH_END, contexts.MicrobatchEndContext)
        self.gradients_ready = self._handler_list(Event.GRADIENTS_READY, Context)
        self.pre_optimizer_step = self._handler_list(Event.PRE_OPTIMIZER_STEP, contexts.PreOptimizerStepContext)
        self.optimizer_step = self._handler_list(Event.OPTIMIZER_STEP, Context)
        self.step_skipped = self._handler_list(Event.STEP_SKIPPED, contexts.StepSkippedContext)
        self.before_zero_grad = self._handler_list(Event.BEFORE_ZERO_GRAD, Context)
        self.after_zero_grad = self._handler_list(Event.AFTER_ZERO_GRAD, Context)
        self.before_scheduler_step = self._handler_list(Event.BEFORE_SCHEDULER_STEP, contexts.SchedulerContext)
        self.after_scheduler_step = self._handler_list(Event.AFTER_SCHEDULER_STEP, contexts.SchedulerContext)
        self.step_end = self._handler_list(Event.STEP_END, contexts.StepEndContext)
        self.train_metrics = self._handler_list(Event.TRAIN_METRICS, contexts.MetricsContext)
        self.log_step = self._handler_list(Event.LOG_STEP, contexts.LogContext)
        self.log = self._handler_list(Event.LOG, contexts.LogContext)
        self.evaluate_begin = self._handler_list(Event.EVALUATE_BEGIN, contexts.EvaluateBeginContext)
        self.prediction_step = self._handler_list(Event.PREDICTION_STEP, contexts.PredictionStepContext)
        self.evaluate_end = self._handler_list(Event.EVALUATE_END, contexts.EvaluateEndContext)
        self.evaluate = self._handler_list(Event.EVALUATE, contexts.EvaluateContext)
        self.predict = self._handler_list(Event.PREDICT, contexts.MetricsContext)
        self.before_save = self._handler_list(Event.BEFORE_SAVE, contexts.BeforeSaveContext)
        self.save = self._handler_list(Event.SAVE, contexts.SaveContext)
        self.step_done = self._handler_list(Event.STEP_DONE, contexts.StepDoneContext)
        self.epoch_end = self._handler_list(Event.EPOCH_END, contexts.EpochContext)
        self.rollback = self._handler_list(Event.ROLLBACK, contexts.RollbackContext)
        self.exception = self._handler_list(Event.EXCEPTION, contexts.ExceptionContext)
        self.train_end = self._handler_list(Event.TRAIN_END, contexts.TrainEndContext)

    def _handler_list(self, event: Event, kind: Callable[P, C]) -> HandlerList[P, C]:
        """``kind``: the event's context, whose arguments are the payload."""
        context = self._new_context(event.context)
        channel: HandlerList[P, C] = HandlerList(event, cast(C, context), MethodType(event.context.__init__, context))
        self.channels[event] = channel
        return channel

    def _new_context(self, kind: type[Context]) -> Context:
        context = kind.__new__(kind)
        for name, value in self._common.items():
            setattr(context, name, value)
        return context

    def bind(self, callbacks: Iterable[object]) -> None:
        """Set the callbacks whose handlers are called, in this order."""
        checked = check_callbacks(callbacks)
        check_supported(checked, self._unsupported_events)
        self._handlers.clear()
        self._idle.clear()
        self._handled.clear()
        self.callbacks = []
        self.gathered = []
        for callback in checked:
            self._add(callback)
        self._fill_channels()

    def _add(self, callback: Callback) -> None:
        handlers = callback.bound_handlers(self)  # on every rank: a shared callback that this creates may have state
        self.callbacks.append(callback)
        self._handled.update(event for event, _ in handlers)
        if self._is_rank_zero or callback.ranks == "all":
            self._handlers += [(callback, event, handler) for event, handler in handlers]

    def _fill_channels(self) -> None:
        called: dict[Event, list[Handler]] = {event: [] for event in self.channels}
        for callback, event, handler in self._handlers:
            is_off = callback.key in self.switched_off and event in _MUTED
            if not is_off and (callback.key, event) not in self._idle:
                called[event].append(handler)
        for event, handlers in called.items():
            self.channels[event].bind(handlers)

    def fire_record(self, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
        """Fire on_log_step, whose handlers may add to a record, then on_log, whose handlers write it.

        Tensors of one element become numbers. Raises CannotSave for a larger one; the message names who may have
        logged it.
        """
        kind = self._user_kind if kind == "user" else kind
        for channel in (self.log_step, self.log):
            channel.fire_with(logs, kind, evaluated_weights)
            for name, value in logs.items():
                if isinstance(value, torch.Tensor):
                    authors = ", ".join(dict.fromkeys(map(owner_of, channel)))
                    logs[name] = number_in_record(name, value, f"one of: {authors}" if authors else "the program")

    def fire_save(self, state: TrainerState, path: Path, step: int, is_best: bool) -> None:
        """Fire on_save, at a step that depends on the disk: records of the user's own are of the kind "save"
        meanwhile, which a resumed run need not repeat."""
        self._user_kind = "save"
        try:
            self.save.fire_with(state, path, step, is_best)
        finally:
            self._user_kind = "user"

    def leave_out_idle(self) -> None:
        """Call no handlers that have nothing to do in this leg, until callbacks are set again. To be called after
        on_train_begin."""
        self._idle = {(callback.key, event) for callback in self.callbacks for event in callback.idle_events()}
        self._fill_channels()

    def shared(self, kind: Callable[[Context], K]) -> K:
        """See :class:`dalsegno.events.callback.Binder`. Callbacks call it while they are bound."""
        if kind not in self._shared:
            self._shared[kind] = kind(self._new_context(Context))
        found = self._shared[kind]
        if found not in self.callbacks:
            self._add(found)
        return cast(K, found)

    def gather_for_record(self, gathered: Gathered) -> None:
        """See :class:`dalsegno.events.callback.Binder`. Callbacks call it while they are bound."""
        self.gathered.append(gathered)

    def listens_anywhere(self, event: Event) -> bool:
        """Whether any rank has a handler for ``event``: equal on all ranks, so that a collective may depend on it."""
        return event in self._handled

    def find(self, key: str) -> Callback:
        """Return the callback with this key."""
        for callback in self.callbacks:
            if callback.key == key:
                return callback
        raise UnknownName("callback", key, [callback.key for callback in self.callbacks])

    def switch_off(self, keys: Iterable[str]) -> None:
        """Set the callbacks, by key, whose handlers for steps, records and evaluations are not called from now on.

        Their state is still saved and loaded. Must not be called while an event fires.
        """
        self.switched_off = frozenset(keys)
        self._fill_channels()

    def check_observes(self, key: str) -> None:
        """Check that the callback with this key may be switched off: then nothing else in the run changes."""
        callback = self.find(key)
        if callback in self._shared.values():
            reason = "others use what it measures"
        elif callback.sets_control_flags:
            reason = "it may set flags of the control; if it sets none, set sets_control_flags = False on its class"
        elif not (callback.background_safe or isinstance(callback, Background)):
            reason = "it takes part in the training, or has to act at once"
        elif _MUTED.isdisjoint(callback.handled_events()):
            reason = "it does nothing between the begin and the end of training"
        else:
            return
        raise ConfigurationError(f"switch {key}: only a callback that observes can be switched off, and {reason}")

    def may_request_each_step(self) -> bool:
        """Whether a callback may set a flag of the control at any step; equal on all ranks."""
        return self._may_request_in(_AT_EACH_STEP)

    def may_request_in_records(self) -> bool:
        """Whether a callback may set a flag of the control when it handles a record; equal on all ranks."""
        return self._may_request_in(_OF_RECORDS)

    def _may_request_in(self, events: Collection[Event]) -> bool:
        return any(event in events for callback in self.callbacks for event in callback.requesting_events())


def number_in_record(name: str, value: torch.Tensor, author: str) -> float:
    """Return the number in a tensor that ``author`` has logged as ``name``. Raises CannotSave for several elements."""
    if value.numel() != 1:
        raise CannotSave(
            f"record key {name!r}: a tensor of shape {tuple(value.shape)}, logged by {author}; log a number, such as "
            "its mean"
        )
    return value.item()


def raise_first(failures: Sequence[BaseException]) -> None:
    """Raise the first of the exceptions, with a note of each other one; nothing if there is none."""
    if failures:
        note_failures(failures[0], failures[1:])
        raise failures[0]


def note_failures(error: BaseException, others: Sequence[BaseException]) -> None:
    """Add a note of each exception that was raised after ``error``."""
    for other in others:
        error.add_note(f"and during teardown: {type(other).__name__}: {other}")


def check_supported(callbacks: Iterable[Callback], unsupported_events: Mapping[Event, str]) -> None:
    """Raises EventNotFired if a callback needs an event that a loop cannot fire, with reason and remedy."""
    for callback in callbacks:
        for event in (*callback.handled_events(), *callback.needs_events):
            if event in unsupported_events and event not in callback.optional_events:
                raise EventNotFired(f"{callback.key} needs {event.handler}, which {unsupported_events[event]}")
