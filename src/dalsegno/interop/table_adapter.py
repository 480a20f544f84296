"""TableAdapter: an adapter for a library whose order of calls is a table, with a row for each method and event."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder, Callback
from dalsegno.events.table import Event
from dalsegno.state import Handler
from dalsegno.stateful.component import State


@dataclass(frozen=True, slots=True)
class Row:
    """Call ``method`` at ``event``, with the arguments named in ``given``, under the condition named in ``when``."""

    event: Event
    method: str
    given: str = ""
    when: str | None = None


class TableAdapter(CallbackAdapter):
    """Adapts a callback whose base class has an empty method for everything, ``state_dict`` included."""

    rows: ClassVar[Sequence[Row]]
    """The whole order. Within an event, from top to bottom."""
    leading: ClassVar[Sequence[str]] = ()
    """Names of the arguments that every method gets first."""
    values: ClassVar[Mapping[str, Callable[[Any, Any], Any]]] = {}
    """Each argument, from the shared state and the context."""
    conditions: ClassVar[Mapping[str, Callable[[Any, Any], bool]]] = {}
    """Each condition, from the shared state and the context."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Classes of the library that are refused, and what to use here."""

    def __init_subclass__(cls) -> None:
        cls.calls = tuple((row.event, row.method) for row in cls.rows)

    def __init__(self, foreign: object, name: str | None = None) -> None:
        """Raises ConfigurationError for a class of the library that cannot work here."""
        for base in type(foreign).__mro__:
            if base.__name__ in self.instead and self._is_theirs(base):
                raise ConfigurationError(
                    f"{type(foreign).__name__} needs parts of the library's own trainer; instead, "
                    f"{self.instead[base.__name__]}"
                )
        self._table = {(row.event, row.method): row for row in self.rows}
        super().__init__(foreign, name)

    @abstractmethod
    def shared_state(self, binder: Binder) -> Callback:
        """Return what all callbacks of this library share in one run."""

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        row = next(row for row in self.rows if row.method == method)
        return (*self.leading, *row.given.split()), ()

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self.shared_state(binder)  # before the callback's own handlers, even if it has none
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, row, function = self.shared_state(binder), self._table[event, method], self.method(method)
        given = [self.values[name] for name in (*self.leading, *row.given.split())]
        is_due = None if row.when is None else self.conditions[row.when]

        def call(_: Any, ctx: Any) -> None:
            if is_due is None or is_due(shared, ctx):
                function(*[value(shared, ctx) for value in given])

        return call

    def _check_names(self) -> None:
        super()._check_names()
        known = {row.method for row in self.rows} | set(self.silent)
        theirs = [cls for cls in type(self.__wrapped__).__mro__ if cls is not object and not self._is_theirs(cls)]
        own = {name for cls in theirs for name, value in vars(cls).items() if callable(value) and name[0] != "_"}
        for name in sorted(own - known):
            if difflib.get_close_matches(name, known, n=1, cutoff=0.9):
                raise UnknownName(f"handler in {type(self.__wrapped__).__name__}:", name, known)

    @classmethod
    def _is_theirs(cls, base: type) -> bool:
        return f"{base.__module__}.".startswith(tuple(f"{package}." for package in cls.packages))

    def method(self, name: str) -> Callable[..., Any]:
        """Return the callback's method of this name."""
        method: Callable[..., Any] = getattr(self.__wrapped__, name)
        return method

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        if not (self._defines("state_dict") or self._defines("load_state_dict")):
            return None
        foreign: Any = self.__wrapped__
        return foreign.state_dict, foreign.load_state_dict
