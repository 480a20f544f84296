"""Foreign callbacks: what makes one that was written for another library look native.

A *dialect* is another library's way to write a callback. Each is a module of :mod:`dalsegno.interop` with a class
``DIALECT``, a subclass of :class:`Adapted`. They are looked up there when the first foreign callback comes along, so
nothing depends on them: without one, callbacks of that dialect are turned away, and that is all.

How a callback's dialect is found, without importing anything of its library:

1. ``adapt(callback, "huggingface")`` says it;
2. else one of its base classes lies in a package of that library, by name;
3. else all its handlers begin with that library's parameters, where these cannot be mistaken.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, update_wrapper
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from dalsegno.errors import ConfigurationError, UnknownDialect, UnknownName
from dalsegno.state import Handler
from dalsegno.stateful.component import State, Stateful

from .callback import Answer, Binder, Callback
from .table import Event

_PLACE = "dalsegno.interop"
_OF_THE_CONTRACT = (
    "state_scope",
    "state_version",
    "state_compared",
    "state_schema",
    "check_state",
    "aliases",
    "migrate",
    "reshard",
    "makes_wishes",
)


def adapt(callback: object, dialect: str | None = None, *, name: str | None = None) -> Callback:
    """A callback that was written for another library, as one of this library.

    Wherever callbacks are given this happens by itself; call it to say what cannot be seen: the dialect of a callback
    without a base class, or a name of its own for one of two callbacks of the same class. What was said is kept as long
    as the result lives.

    Args:
        callback: a native one is returned as it is.
        dialect: such as ``"huggingface"``; None: it is found by the callback's base classes, or by its parameters.
        name: the key under which its state is saved; None: its own ``name`` if it has one, else its class's name.

    Raises:
        UnknownDialect: if it is not seen which dialect this is; the message lists them all.
        UnknownName: for a dialect that does not exist, or a misspelt handler.
        ConfigurationError: for a class, or a handler that cannot be called as its dialect calls it.
    """
    if isinstance(callback, type):
        raise ConfigurationError(f"callbacks: {callback.__name__} is a class; give an instance: {callback.__name__}(…)")
    if isinstance(callback, Callback):
        return callback
    if dialect is None and name is None and id(callback) in _adapted:
        return _adapted[id(callback)]
    kind = _found(callback) if dialect is None else _named(dialect)
    adapted = _adapted[id(callback)] = kind(callback, name)
    return adapted


class CallbackAdapter(Callback):
    """A foreign callback as the dispatcher sees it. A dialect says in a subclass which method is called when, and how.

    Everything is bound once: when an event fires, a method is called as directly as can be.
    """

    dialect: ClassVar[str]
    """Its name, as ``adapt`` takes it."""
    packages: ClassVar[tuple[str, ...]]
    """Where the base classes of its callbacks live: packages or modules."""
    bases: ClassVar[tuple[str, ...]]
    """Base classes in there whose handlers do nothing: what is not overridden is not called."""
    parameters: ClassVar[tuple[str, ...]] = ()
    """How the parameters of its handlers begin, if no other dialect's do; empty if that could be mistaken."""
    calls: ClassVar[Sequence[tuple[Event, str]]]
    """At which event which method is called, in this order."""
    silent: ClassVar[Sequence[str]] = ()
    """Handlers of the library that nothing here calls."""
    observes = False

    def __init__(self, foreign: object, name: str | None = None) -> None:
        """
        Raises:
            UnknownName: for a misspelt handler.
            ConfigurationError: for a handler that cannot be called as this dialect calls it.
        """
        self.__wrapped__ = foreign
        self.name = name
        for attribute in _OF_THE_CONTRACT:
            if hasattr(foreign, attribute):
                setattr(self, attribute, getattr(foreign, attribute))
        state = self.state_methods()
        if state is not None:
            self.state_dict, self.load_state_dict = state
        self._check_names()
        for _, method in self.own_calls():
            self._check_signature(method)

    @classmethod
    def held_globally(cls) -> Iterable[object]:
        """Callbacks that the library itself, where it is loaded, was told to let listen to every run."""
        return ()

    @property
    def key(self) -> str:
        own = getattr(self.__wrapped__, "name", None)
        return self.name or (own if isinstance(own, str) and own else type(self.__wrapped__).__name__)

    @abstractmethod
    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        """A function ``(adapted, ctx)`` that calls this method at this event of one run."""

    @abstractmethod
    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        """What this method is called with: names of positional arguments, and of keyword arguments."""

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """How its state is taken and given back; None if it has none."""
        foreign = self.__wrapped__
        return (foreign.state_dict, foreign.load_state_dict) if isinstance(foreign, Stateful) else None

    def own_calls(self) -> list[tuple[Event, str]]:
        """Those of :attr:`calls` that it has a method of its own for."""
        return [(event, method) for event, method in self.calls if self._defines(method)]

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys(event for event, _ in self.own_calls()))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [(event, self.handler(method, self.call(event, method, binder))) for event, method in self.own_calls()]

    def handler(self, method: str, call: Callable[[Any, Any], Answer]) -> Handler:
        """``call`` as a handler of this callback; what goes wrong in it is told with the foreign method's name."""
        update_wrapper(call, getattr(self.__wrapped__, method), assigned=(), updated=())
        return MethodType(call, self)

    def _defines(self, method: str) -> bool:
        """Whether the method is more than an empty one of the library's base class."""
        if method in getattr(self.__wrapped__, "__dict__", {}):
            return True
        owner = next((cls for cls in type(self.__wrapped__).__mro__ if method in vars(cls)), None)
        return owner is not None and not (owner.__name__ in self.bases and _lies_in(owner, self.packages))

    def _check_names(self) -> None:
        known = {method for _, method in self.calls} | set(self.silent)
        for method in _handlers(self.__wrapped__) - known:
            owner = next((cls for cls in type(self.__wrapped__).__mro__ if method in vars(cls)), None)
            theirs = owner is not None and _lies_in(owner, self.packages)  # newer than what is known here
            if not theirs and difflib.get_close_matches(method, known, n=1, cutoff=0.8):
                raise UnknownName(f"handler in {type(self.__wrapped__).__name__}:", method, known)

    def _check_signature(self, method: str) -> None:
        positional, keywords = self.arguments(method)
        signature = inspect.signature(getattr(self.__wrapped__, method))
        try:
            signature.bind(*positional, **dict.fromkeys(keywords))
        except TypeError as error:
            given = ", ".join([*positional, *(f"{keyword}=" for keyword in keywords)])
            raise ConfigurationError(
                f"{self.key}.{method}{signature} cannot be called as {self.dialect} calls it, with ({given}): {error}"
            ) from error


def external_global_callbacks() -> list[Callback]:
    """Callbacks that listen to every run because their own library was told so, as by its ``with callback:``."""
    return [adapt(callback) for kind in _dialects().values() for callback in kind.held_globally()]


_adapted: WeakValueDictionary[int, CallbackAdapter] = (
    WeakValueDictionary()
)  # id of the foreign callback, which each holds


@cache
def _dialects() -> dict[str, type[CallbackAdapter]]:
    """By name; those whose modules are there."""
    try:
        package = importlib.import_module(_PLACE)
    except ModuleNotFoundError:
        return {}
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    kinds = [importlib.import_module(f"{_PLACE}.{name}").DIALECT for name in names]
    return {kind.dialect: kind for kind in kinds}


def _named(dialect: str) -> type[CallbackAdapter]:
    if dialect not in _dialects():
        raise UnknownName("dialect", dialect, _dialects())
    return _dialects()[dialect]


def _found(callback: object) -> type[CallbackAdapter]:
    for seen in (_by_base, _by_parameters):
        kinds = [kind for kind in _dialects().values() if seen(callback, kind)]
        if len(kinds) == 1:
            return kinds[0]
    known = ", ".join(map(repr, _dialects())) or "none"
    raise UnknownDialect(
        f"callbacks: {callback!r} is not a dalsegno.Callback, and its dialect is not to be seen; if it was written for "
        f"another library, say which: dalsegno.adapt(callback, dialect). Known dialects: {known}"
    )


def _by_base(callback: object, kind: type[CallbackAdapter]) -> bool:
    return any(_lies_in(cls, kind.packages) for cls in type(callback).__mro__)


def _by_parameters(callback: object, kind: type[CallbackAdapter]) -> bool:
    handlers = [inspect.signature(getattr(callback, name)) for name in _handlers(callback)]
    count = len(kind.parameters)
    return bool(count and handlers) and all(
        tuple(signature.parameters)[:count] == kind.parameters for signature in handlers
    )


def _lies_in(cls: type, packages: tuple[str, ...]) -> bool:
    return any(f"{cls.__module__}.".startswith(f"{package}.") for package in packages)


def _handlers(callback: object) -> set[str]:
    return {name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name, None))}
