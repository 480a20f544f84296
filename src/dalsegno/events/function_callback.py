"""FunctionCallback: a function as a callback."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

from dalsegno.errors import ConfigurationError

from .callback import Callback
from .table import Event

Function = Callable[[Any], Any]
"""``f(ctx)``, like a handler without ``self``."""

_ALSO_IN_EVALUATION = {Event.BEFORE_FORWARD, Event.AFTER_FORWARD}
_EVENTS = list(Event)
_BEFORE_COUNTED = set(_EVENTS[_EVENTS.index(Event.STEP_BEGIN) : _EVENTS.index(Event.STEP_END)])
_AFTER_COUNTED = set(_EVENTS[_EVENTS.index(Event.STEP_END) : _EVENTS.index(Event.EPOCH_END)]) - {Event.PREDICT}


@overload
def on(event: Event, function: Function, *, every: int = 1, name: str | None = None) -> FunctionCallback: ...
@overload
def on(event: Event, *, every: int = 1, name: str | None = None) -> Callable[[Function], FunctionCallback]: ...
def on(
    event: Event, function: Function | None = None, *, every: int = 1, name: str | None = None
) -> FunctionCallback | Callable[[Function], FunctionCallback]:
    """Turn a function into a callback: ``on(Event.SAVE, upload)``. Without the function, return a decorator::

        @ds.on(Event.STEP_END, every=100)
        def show(ctx):
            print(ctx.step, ctx.loss)

        trainer = ds.Trainer(..., callbacks=[show])

    Args:
        event: the event that calls it.
        function: called with the event's context; may return a TrainerControl.
        every: call it only at steps that are multiples of this; for events that belong to a step.
        name: the callback's key, unique in a run. None: the function's name.

    Raises:
        ConfigurationError: for something that is not an event, or a function that cannot be called with ``ctx``; for
            ``every`` below 1, or with an event that does not belong to a step.
    """
    if function is None:
        return lambda decorated: FunctionCallback(event, decorated, every, name)
    return FunctionCallback(event, function, every, name)


class FunctionCallback(Callback):
    """The result of :func:`on`. Calling it calls the function."""

    def __init__(self, event: Event, function: Function, every: int, name: str | None) -> None:
        if not isinstance(event, Event):
            raise ConfigurationError(f"on({event!r}, …): needs an event: dalsegno.Event.{_nearest(str(event))}")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        _check(self.name, event, function, every)
        called = _every_nth(function, every, event in _BEFORE_COUNTED) if every > 1 else function
        setattr(self, event.handler, MethodType(_handler(called), self))

    def __call__(self, ctx: Any) -> Any:
        return self.function(ctx)


def _handler(function: Function) -> Callable[[Any, Any], Any]:
    """Turn ``function`` into a method; async if the function is, so that its kind stays detectable."""
    if not inspect.iscoroutinefunction(function):
        return lambda _, ctx: function(ctx)

    async def handler(_: Any, ctx: Any) -> Any:
        return await function(ctx)

    return handler


def _every_nth(function: Function, every: int, is_ahead: bool) -> Function:
    """Call ``function`` every ``every`` steps. ``is_ahead``: the running step is not counted in global_step yet."""

    def is_due(ctx: Any) -> bool:
        step: int = ctx.state.global_step + is_ahead
        return step % every == 0

    if not inspect.iscoroutinefunction(function):
        return lambda ctx: function(ctx) if is_due(ctx) else None

    async def call(ctx: Any) -> Any:
        return await function(ctx) if is_due(ctx) else None

    return call


def _check(name: str, event: Event, function: Function, every: int) -> None:
    if not callable(function):
        raise ConfigurationError(f"on({event}, {function!r}): needs a function")
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        raise ConfigurationError(
            f"on({event}, {name}): {name}{inspect.signature(function)} cannot be called with (ctx): {error}"
        ) from error
    if type(every) is not int or every < 1:
        raise ConfigurationError(f"on({event}, {name}, every={every!r}): needs an integer of steps, at least 1")
    if every > 1 and event not in (_BEFORE_COUNTED | _AFTER_COUNTED) - _ALSO_IN_EVALUATION:
        raise ConfigurationError(
            f"on({event}, {name}, every={every}): {event.handler} does not belong to a step; leave every= out"
        )


def _nearest(given: str) -> str:
    names = {member.name: member.name for member in Event} | {member.handler: member.name for member in Event}
    return names[difflib.get_close_matches(given, names, n=1, cutoff=0.0)[0]]
