"""functions: functions as callbacks, as in InstructLab's first proposal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Binder, Callback, Construction
from dalsegno.events.table import Event
from dalsegno.state import Handler
from dalsegno.system.worker import Counts

from . import InstructLab
from .context import FunctionContext, TrainingContext
from .shared_state import SharedState

Function = Callable[..., Any]
"""``f(context, **kwargs)``; may be async."""

EVENTS = tuple(dict.fromkeys(method for _, method in InstructLab.calls))

_ALIASES = {"on_checkpoint": "on_save", "on_validation_loss": "on_evaluate"}

_EVENT_ARGUMENTS: dict[str, Callable[[TrainingContext], dict[str, Any]]] = {
    "on_save": lambda context: {"checkpoint_path": context.checkpoint_path},
    "on_evaluate": lambda context: {"validation_loss": context.val_metrics.get("val_loss")},
    "on_log": lambda context: {"loss": context.loss},
}


def functions(*, name: str | None = None, **on: Function | Sequence[Function]) -> Callback:
    """Call functions at events: ``functions(on_save=run_eval, on_evaluate=[first, second])``.

    Each function is called as ``f(context, **kwargs)`` with a ``FunctionContext``. If it has a parameter of that name,
    or takes ``**kwargs``, it also gets ``checkpoint_path`` (on_save), ``validation_loss`` (on_evaluate) or ``loss``
    (on_log). Each runs on rank 0 only, on a separate thread. What it raises is logged and counted; training continues.

    Args:
        name: the callback's key; two callbacks of one run need different ones. None: made of the functions' names.
        on: one or several functions for each event: ``on_train_begin``, ``on_epoch_begin``, ``on_step_begin``,
            ``on_before_forward``, ``on_after_forward``, ``on_before_backward``, ``on_after_backward``,
            ``on_before_optimizer_step``, ``on_pre_optimizer_step``, ``on_after_optimizer_step``,
            ``on_optimizer_step``, ``on_log``, ``on_evaluate``, ``on_save``, ``on_step_end``, ``on_epoch_end``,
            ``on_train_end``.

    Raises:
        UnknownName: for an unknown event; the message names the nearest.
        ConfigurationError: for something that cannot be called with these arguments.
    """
    for event in on:
        if event not in EVENTS:
            raise UnknownName("event", event, EVENTS, _ALIASES)
    observers = [_observer(event, each) for event, given in on.items() for each in _as_sequence(given)]
    made = Functions(observers, name)
    made.construction = Construction(functions, (), {"name": name, **on})
    return made


class FunctionObserver(InstructLab):
    """Calls one function at one event."""

    def converted(self, context: TrainingContext, shared: SharedState) -> TrainingContext:
        return FunctionContext.of(context, shared.args)


class Functions(Callback):
    """Several functions, each in the background."""

    sets_control_flags = False
    background_safe = False
    ranks = "zero"

    def __init__(self, observers: Sequence[InstructLab], name: str | None) -> None:
        self._observers = observers
        self.name = name or f"functions({', '.join(observer.key for observer in observers)})"

    @property
    def counts(self) -> dict[str, Counts]:
        """For each function, the numbers of calls that ran, failed, and were dropped."""
        return {observer.key: observer.counts for observer in self._observers}

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys(event for observer in self._observers for event in observer.handled_events()))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [each for observer in self._observers for each in observer.bound_handlers(binder)]


def _as_sequence(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [given]


def _observer(event: str, function: Function) -> InstructLab:
    if not callable(function):
        raise ConfigurationError(f"functions({event}={function!r}): needs a function, or a list of functions")
    added: Callable[[TrainingContext], dict[str, Any]] = _EVENT_ARGUMENTS.get(event, lambda context: {})
    accepted = _accepted(event, function, list(added(FunctionContext())))

    def call(context: TrainingContext) -> Any:
        return function(context, **{name: value for name, value in added(context).items() if name in accepted})

    name = getattr(function, "__name__", type(function).__name__)
    return FunctionObserver(SimpleNamespace(**{"name": name, event: call}))


def _accepted(event: str, function: Function, added: list[str]) -> list[str]:
    """Return those of the event's arguments that the function takes."""
    signature = inspect.signature(function)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    accepted = [name for name in added if takes_all or name in signature.parameters]
    try:
        signature.bind(FunctionContext(), **dict.fromkeys(accepted))
    except TypeError as error:
        given = ", ".join(["context", *(f"{name}=" for name in added)])
        raise ConfigurationError(
            f"functions({event}={getattr(function, '__name__', function)}): cannot be called with ({given}): {error}"
        ) from error
    return accepted
