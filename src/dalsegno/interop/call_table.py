"""TableAdapter: an adapter for a library whose order of calls is a table, with a row for each method and event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .stand_in import Progress


@dataclass(frozen=True, slots=True)
class Row:
    """Call ``method`` at ``event``, with the arguments named in ``given``, under the condition named in ``when``."""

    event: Event
    method: str
    given: str = ""
    when: str | None = None
    once: str | None = None
    """An attribute of the shared state: the method is called once for each object that is its value."""
    scope: Callable[[Any, Any], AbstractContextManager[None]] | None = None
    """Makes the call inside this, of the shared state and the context."""


class TableAdapter(CallbackAdapter):
    """Adapts a callback by a table of rows. What a method logs at LOG_STEP is in that record."""

    rows: ClassVar[Sequence[Row]]
    """The whole order. Within an event, from top to bottom."""
    shared_kind: ClassVar[type[Progress]]
    """What all callbacks of this library share in one run."""
    leading: ClassVar[Sequence[str]]
    """Names of the arguments that every method gets first."""
    values: ClassVar[Mapping[str, Callable[[Any, Any], Any]]]
    """Each argument, from the shared state and the context."""
    conditions: ClassVar[Mapping[str, Callable[[Any, Any], bool]]]
    """Each condition, from the shared state and the context."""
    state_hooks: ClassVar[Mapping[str, str]]
    """Methods that put state into a dict, or read it from there, each with the name of its last argument."""

    def __init_subclass__(cls) -> None:
        cls.calls = tuple((row.event, row.method) for row in cls.rows)

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._shared: Any = None
        self._called: dict[str, object] = {}  # for methods that are called once, the object of the newest call
        self._table = {(row.event, row.method): row for row in self.rows}
        super().__init__(foreign, name)
        for method in self.state_hooks:
            if self._defines(method):
                self._check_signature(method)

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        given = self.state_hooks.get(method) or next(row.given for row in self.rows if row.method == method)
        return (*self.leading, *given.split()), ()

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._shared = binder.shared(self.shared_kind)  # before the callback's own handlers, even if it has none
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, row, function = self._shared, self._table[event, method], self.method(method)
        given = [self.values[name] for name in (*self.leading, *row.given.split())]
        is_due = None if row.when is None else self.conditions[row.when]
        is_in_record = event is Event.LOG_STEP

        def call(_: Any, ctx: Any) -> None:
            if is_due is None or is_due(shared, ctx):
                function(*[value(shared, ctx) for value in given])
                if is_in_record:
                    shared.collected.move_into(ctx)

        def call_specially(adapted: Any, ctx: Any) -> None:
            if row.once is not None:
                life = getattr(shared, row.once)
                if self._called.get(method) is life:
                    return
                self._called[method] = life
            with nullcontext() if row.scope is None else row.scope(shared, ctx):
                call(adapted, ctx)

        return call_specially if row.once or row.scope else call

    def method(self, name: str) -> Callable[..., Any]:
        """Return the callback's method of this name, as :meth:`call` calls it."""
        method: Callable[..., Any] = getattr(self.__wrapped__, name)
        return method
