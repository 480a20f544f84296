"""Adapters: make callbacks that were written for another library look native.

A *dialect* is another library's way to write a callback. Each is a module or package of :mod:`dalsegno.interop` with a
class ``DIALECT``, a subclass of :class:`CallbackAdapter`. Dialects are looked up when the first foreign callback is
given, so nothing depends on them: if one is removed, only callbacks of that dialect are refused.

A callback's dialect is determined without importing its library:

1. explicitly, by ``adapt(callback, dialect)``;
2. else by the name of the package that defines one of its base classes;
3. else by the parameters of its handlers, if all start with those of one library and these are unambiguous.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, update_wrapper
from types import FunctionType, MethodType
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from dalsegno.errors import ConfigurationError, UnknownDialect, UnknownName, expect_known
from dalsegno.state import Handler
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.component import State, Stateful

from .callback import Answer, Binder, Callback, Construction, refusal
from .table import Event

_DIALECTS = "dalsegno.interop"
_STATE_ATTRIBUTES = (
    *("state_scope", "state_version", "state_compared", "state_varies", "state_schema", "check_state"),
    *("aliases", "migrate", "reshard", "sets_control_flags"),
)


@check_types
def adapt(
    callback: object, dialect: str | None = None, *, name: str | None = None, state: str | Sequence[str] = ()
) -> Callback:
    """Adapt a callback that was written for another library.

    This happens by itself wherever callbacks are given. Call it for what cannot be detected: the dialect of a callback
    without a base class, a name for one of two of the same class, or the state of a class without ``state_dict``. These
    settings are remembered as long as the result is alive.

    Args:
        callback: a native one is returned itself.
        dialect: e.g. ``"huggingface"``; None: detect it from the base classes or the parameters.
        name: the key under which its state is saved; None: its own ``name`` if it has one, else its class's name.
        state: attributes that are saved with each checkpoint and restored before ``on_train_begin``.

    Raises:
        UnknownDialect: if the dialect cannot be detected; the message lists all dialects.
        UnknownName: for an unknown dialect, a misspelt handler, or an attribute that the callback does not have.
        ConfigurationError: for a class, a handler that cannot be called as its dialect calls it, or ``state=`` of a
            callback with a ``state_dict``.
    """
    if isinstance(callback, type):
        raise ConfigurationError(f"callbacks: {callback.__name__} is a class; give an instance: {callback.__name__}(…)")
    if isinstance(callback, Callback):
        if state:
            raise ConfigurationError(f"{callback.key} is dalsegno's own kind: give its class a state_dict, not state=")
        if name is not None:
            callback.name = name
        return callback
    former = _adapted.get(id(callback))
    if former is not None:
        if not (dialect or name or state):
            return former
        dialect, name, state = dialect or former.dialect, name or former.name, state or former.saved_attributes
    expect_known("dialect", [] if dialect is None else [dialect], installed_dialects())
    kind = _detect_dialect(callback) if dialect is None else installed_dialects()[dialect]
    adapted = _adapted[id(callback)] = kind(callback, name)
    if state:
        adapted.save_attributes([state] if isinstance(state, str) else [*state])
        adapted.construction = Construction(adapt, (callback, kind.dialect), {"name": name, "state": state})
    return adapted


class CallbackAdapter(Callback):
    """A foreign callback as the dispatcher sees it. A dialect's subclass defines which method is called when, and how.

    Everything is bound once, so that firing an event calls the foreign method as directly as possible.
    """

    dialect: ClassVar[str]
    """The dialect's name, as passed to ``adapt``."""
    packages: ClassVar[tuple[str, ...]]
    """Packages or modules that define the base classes of its callbacks."""
    bases: ClassVar[tuple[str, ...]]
    """Base classes whose handlers do nothing: a handler that is not overridden is not called."""
    parameters: ClassVar[tuple[str, ...]] = ()
    """The first parameters of its handlers, if no other dialect has the same; empty if they are ambiguous."""
    calls: ClassVar[Sequence[tuple[Event, str]]]
    """Method to call at each event, in this order."""
    silent: ClassVar[Sequence[str]] = ()
    """Handlers of the library that are never called here."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Classes of the library that are refused, and what to use here."""
    saves_states: ClassVar[bool] = True
    """Whether the library saves states of callbacks: then its own classes have those that they need."""
    background_safe = False
    saved_attributes: Sequence[str] = ()
    """Names of the callback's attributes that are its state."""

    def __init__(self, foreign: object, name: str | None = None) -> None:
        for base in type(foreign).__mro__:
            if base.__name__ in self.instead and self._is_theirs(base):
                raise ConfigurationError(
                    f"{type(foreign).__name__} needs parts of the library's own trainer; instead, "
                    f"{self.instead[base.__name__]}"
                )
        self.__wrapped__ = foreign
        self.name = name
        for attribute in _STATE_ATTRIBUTES:
            if hasattr(foreign, attribute):
                setattr(self, attribute, getattr(foreign, attribute))
        state = self.state_methods()
        if state is not None:
            self.state_dict, self.load_state_dict = state
        self._check_names()
        for _, method in self.overridden_calls():
            self._check_signature(method)

    @classmethod
    def registered_globally(cls) -> Iterable[object]:
        """Return callbacks that the library itself has registered for every run.

        Called if the package of the dialect has the name of the library, and that is imported.
        """
        return ()

    @property
    def default_name(self) -> str:
        own = getattr(self.__wrapped__, "name", None)
        return own if isinstance(own, str) and own else type(self.__wrapped__).__name__

    @abstractmethod
    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        """Return a function ``(adapted, ctx)`` that calls ``method`` at ``event`` of one run."""

    @abstractmethod
    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the names of the positional and of the keyword arguments that ``method`` is called with."""

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """Return the methods that take and restore its state; None if it is stateless."""
        foreign = self.__wrapped__
        return (foreign.state_dict, foreign.load_state_dict) if isinstance(foreign, Stateful) else None

    def unsaved_attributes(self) -> dict[str, Any]:
        """Return the attributes that no checkpoint contains, though the library's authors did not mean it."""
        kinds = type(self.__wrapped__).__mro__
        theirs = [kind for kind in kinds if self.saves_states and self._is_theirs(kind)]
        if isinstance(self, Stateful) or kinds[0] in theirs:
            return {}
        methods = [each for kind in theirs for each in vars(kind).values() if isinstance(each, FunctionType)]
        meant = {name for method in methods for name in inspect.unwrap(method).__code__.co_names}
        held: dict[str, Any] = {}
        for kind in (each for each in reversed(kinds) if each not in theirs):
            held |= vars(kind)  # a default, which the first change replaces in the callback itself
        held |= getattr(self.__wrapped__, "__dict__", {})
        return {name: value for name, value in held.items() if name not in meant}

    def save_attributes(self, names: Sequence[str]) -> None:
        """Let these attributes of the callback be its state."""
        foreign = self.__wrapped__
        if isinstance(self, Stateful):
            raise ConfigurationError(f"{self.key} has a state_dict, which says what is saved; it takes no state=")
        for name in names:
            if not hasattr(foreign, name):
                raise UnknownName(f"attribute of {type(foreign).__name__}:", name, vars(foreign))
        self.saved_attributes = names
        self.state_dict, self.load_state_dict = self._read_attributes, self._set_attributes

    def _read_attributes(self) -> State:
        return {name: getattr(self.__wrapped__, name) for name in self.saved_attributes}

    def _set_attributes(self, state: State) -> None:
        for name in self.saved_attributes:
            if name in state:
                setattr(self.__wrapped__, name, state[name])

    def overridden_calls(self) -> list[tuple[Event, str]]:
        """Return those of :attr:`calls` whose method the callback overrides."""
        return [(event, method) for event, method in self.calls if self._defines(method)]

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys(event for event, _ in self.overridden_calls()))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [(event, self.handler(name, self.call(event, name, binder))) for event, name in self.overridden_calls()]

    def handler(self, method: str, call: Callable[[Any, Any], Answer]) -> Handler:
        """Turn ``call`` into a handler of this callback; error notes name the foreign method."""
        update_wrapper(call, getattr(self.__wrapped__, method), assigned=(), updated=())
        return MethodType(call, self)

    def _defines(self, method: str) -> bool:
        """Whether the method is not just the empty one of the library's base class."""
        owner = self._owner(method)
        is_empty = owner is None or (owner.__name__ in self.bases and self._is_theirs(owner))
        return not is_empty or method in getattr(self.__wrapped__, "__dict__", {})

    def _owner(self, method: str) -> type | None:
        return next((cls for cls in type(self.__wrapped__).__mro__ if method in vars(cls)), None)

    @classmethod
    def _is_theirs(cls, kind: type) -> bool:
        """Whether the library itself defines the class."""
        return any(f"{kind.__module__}.".startswith(f"{package}.") for package in cls.packages)

    def _check_names(self) -> None:
        known = {method for _, method in self.calls} | set(self.silent)
        for method in _handlers(self.__wrapped__) - known:
            owner = self._owner(method)
            is_newer = owner is not None and self._is_theirs(owner)  # an event of a newer version of the library
            if not is_newer and difflib.get_close_matches(method, known, n=1, cutoff=0.8):
                raise UnknownName(f"handler in {type(self.__wrapped__).__name__}:", method, known)

    def _check_signature(self, method: str) -> None:
        positional, keywords = self.arguments(method)
        called = getattr(self.__wrapped__, method)
        if (error := refusal(called, *positional, **dict.fromkeys(keywords))) is not None:
            given = ", ".join([*positional, *(f"{keyword}=" for keyword in keywords)])
            raise ConfigurationError(
                f"{self.key}.{method}{inspect.signature(called)} cannot be called as {self.dialect} calls it, with "
                f"({given}): {error}"
            ) from error


def external_global_callbacks() -> list[Callback]:
    """Return callbacks that their own library has registered for every run, e.g. by ``with callback:``.

    A library that is not imported has registered none, so its dialect is not imported either: all dialects together
    take a twentieth of a second.
    """
    imported = [_dialect_in(name) for name in _modules() if name in sys.modules]
    return [adapt(callback) for kind in imported if kind is not None for callback in kind.registered_globally()]


_adapted: WeakValueDictionary[int, CallbackAdapter] = WeakValueDictionary()
"""By the id of the foreign callback, which each holds."""


@cache
def installed_dialects() -> dict[str, type[CallbackAdapter]]:
    """Return the dialects by name."""
    return {kind.dialect: kind for name in _modules() if (kind := _dialect_in(name)) is not None}


@cache
def _modules() -> list[str]:
    """Names of the modules of :mod:`dalsegno.interop`, some of which have a dialect."""
    try:
        package = importlib.import_module(_DIALECTS)
    except ModuleNotFoundError:
        return []
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def _dialect_in(module: str) -> type[CallbackAdapter] | None:
    return getattr(importlib.import_module(f"{_DIALECTS}.{module}"), "DIALECT", None)


def _detect_dialect(callback: object) -> type[CallbackAdapter]:
    def has_base(kind: type[CallbackAdapter]) -> bool:
        return any(kind._is_theirs(cls) for cls in type(callback).__mro__)

    def has_parameters(kind: type[CallbackAdapter]) -> bool:
        known = kind.parameters
        handlers = [tuple(inspect.signature(getattr(callback, name)).parameters) for name in _handlers(callback)]
        return bool(known and handlers) and all(names[: len(known)] == known for names in handlers)

    for matches in (has_base, has_parameters):
        kinds = [kind for kind in installed_dialects().values() if matches(kind)]
        if len(kinds) == 1:
            return kinds[0]
    if isinstance(callback, FunctionType):
        raise UnknownDialect(
            f"callbacks: {callback.__name__} is a function; say at which event it is called: "
            "dalsegno.on(dalsegno.Event.STEP_END, function)"
        )
    if isinstance(callback, str):
        raise UnknownDialect(
            f"callbacks: {callback!r} is a text; give the callback, or dalsegno.load_callbacks([{callback!r}])"
        )
    known = ", ".join(map(repr, installed_dialects())) or "none"
    raise UnknownDialect(
        f"callbacks: {callback!r} is not a dalsegno.Callback, and its dialect cannot be detected; if it was written "
        f"for another library, name it: dalsegno.adapt(callback, dialect). Known dialects: {known}"
    )


def _handlers(callback: object) -> set[str]:
    return {name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name, None))}
