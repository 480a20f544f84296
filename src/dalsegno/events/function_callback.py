"""FunctionCallback: a function as a callback."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

from dalsegno.errors import ConfigurationError

from .callback import Callback, refusal
from .table import Event

Function = Callable[[Any], Any]
"""``f(ctx)``, like a handler without ``self``."""

_BEFORE_COUNTED = {*Event.between(Event.STEP_BEGIN, Event.AFTER_SCHEDULER_STEP)}
_ALSO_IN_EVALUATION = {Event.BEFORE_FORWARD, Event.AFTER_FORWARD}
_OF_STEPS = {*Event.between(Event.STEP_BEGIN, Event.SAVE)} - {Event.PREDICT} - _ALSO_IN_EVALUATION


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
            names = {member.name: member.name for member in Event} | {member.handler: member.name for member in Event}
            (nearest,) = difflib.get_close_matches(str(event), names, n=1, cutoff=0.0)
            raise ConfigurationError(f"on({event!r}, …): needs an event: dalsegno.Event.{names[nearest]}")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        self._check(event, every)
        setattr(self, event.handler, MethodType(_handler(function, every, event in _BEFORE_COUNTED), self))

    def __call__(self, ctx: Any) -> Any:
        return self.function(ctx)

    def _check(self, event: Event, every: int) -> None:
        function, called = self.function, f"on({event}, {self.name}"
        if not callable(function):
            raise ConfigurationError(f"on({event}, {function!r}): needs a function")
        if (error := refusal(function, object())) is not None:
            raise ConfigurationError(
                f"{called}): {self.name}{inspect.signature(function)} cannot be called with (ctx): {error}"
            ) from error
        if type(every) is not int or every < 1:
            raise ConfigurationError(f"{called}, every={every!r}): needs an integer of steps, at least 1")
        if every > 1 and event not in _OF_STEPS:
            raise ConfigurationError(
                f"{called}, every={every}): {event.handler} does not belong to a step; leave every= out"
            )


def _handler(function: Function, every: int, is_ahead: bool) -> Callable[[Any, Any], Any]:
    """Turn ``function`` into a method; async if the function is, so that its kind stays detectable.

    ``is_ahead``: the running step is not counted in global_step yet.
    """

    def is_due(ctx: Any) -> bool:
        return bool((ctx.state.global_step + is_ahead) % every == 0)

    async def async_handler(_: Any, ctx: Any) -> Any:
        return await function(ctx) if is_due(ctx) else None

    if inspect.iscoroutinefunction(function):
        return async_handler
    if every > 1:
        return lambda _, ctx: function(ctx) if is_due(ctx) else None
    return lambda _, ctx: function(ctx)
