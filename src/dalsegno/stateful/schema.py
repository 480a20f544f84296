"""Schema of saved data, as a type: a value is validated before it is used.

The author of a state declares its schema beside ``state_dict``, with the types that also check the writing code::

    class ClockState(TypedDict):
        seconds: Annotated[float, Must("0 or more", lambda seconds: seconds >= 0)]

    class Clock:
        state_schema = ClockState

Supported are TypedDict (exactly its keys; ``NotRequired`` ones may be missing), dataclasses (as a dict of their
fields; those with a default may be missing), ``dict[K, V]``, ``list[X]``, ``tuple[X, Y]``, ``tuple[X, ...]``,
``X | Y``, ``Literal``, ``Any``, ``Annotated[X, Must(…)]``, and any class. An ``int`` has 64 bits and is not a bool; an
``int`` is accepted as a ``float``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal, NotRequired, Union

from dalsegno.errors import DalsegnoError, StateMismatch

Form = Any
"""A type, as described above."""

_LARGEST, _SMALLEST = (1 << 64) - 1, -(1 << 63)  # range of signed and unsigned 64-bit integers
_LONGEST_SHOWN = 60  # characters


@dataclass(frozen=True, slots=True)
class Must:
    """A further condition on a value: its description, and a predicate on a value of the right type.

    If ``fits`` raises, the value does not fit.
    """

    words: str
    fits: Callable[[Any], object]


Count = Annotated[int, Must("0 or more", lambda count: count >= 0)]
"""Steps, samples, bytes."""

Finite = Annotated[float, Must("a finite number", math.isfinite)]
"""Not NaN and not infinite."""


def check(value: Any, form: Form, where: str, error: Callable[[str], DalsegnoError] = StateMismatch) -> None:
    """Validate ``value`` against ``form``.

    Args:
        where: name of the value, e.g. ``step-00000500: rng``; the error adds the path inside it: ``rng.numpy[2]``.
        error: makes the error from the message.

    Raises:
        StateMismatch: (or the result of ``error``) naming the path of the first mismatch, the value and what is valid.
    """
    try:
        _checker(form)(value)
    except _Mismatch as mismatch:
        path = "".join(_step(key) for key in reversed(mismatch.path))
        raise error(f"{where}{path}: {mismatch.complaint}") from mismatch.__cause__


def check_like(value: Any, example: Any, where: str) -> None:
    """Validate a state without a schema against an example, such as the present state.

    Any number matches a number, a list matches a tuple, and None matches a bool. Items and keys that both sides have
    are compared: there may be more parameter groups now, or other names. Two tuples must have the same length. If the
    example is None, a string, or not plain data, any value matches.

    Raises:
        StateMismatch: naming the path of the first mismatch.
    """
    if isinstance(example, dict):
        check(value, dict[Any, Any], where)
        for key in value.keys() & example.keys():
            check_like(value[key], example[key], where + _step(key))
    elif isinstance(example, (list, tuple)):
        check(value, list[Any] | tuple[Any, ...], where)
        if isinstance(value, tuple) and isinstance(example, tuple) and len(value) != len(example):
            raise StateMismatch(f"{where}: has {len(value)} items; must have {len(example)}")
        for number, (each, other) in enumerate(zip(value, example, strict=False)):
            check_like(each, other, where + _step(number))
    elif isinstance(example, bool):
        check(value, bool | None, where)
    elif _is_number(example) or _is_scalar(example):
        check(value, Annotated[Any, Must("a number", lambda value: _is_number(value) or _is_scalar(value))], where)


def _is_scalar(value: Any) -> bool:
    """Whether ``value`` is a tensor or an array with a single element."""
    return hasattr(value, "dtype") and hasattr(value, "item") and math.prod(value.shape) == 1


class _Mismatch(Exception):
    """``path``: keys from the inside out. ``wanted``: the valid type, if the value has another type."""

    def __init__(self, complaint: str, wanted: str = "") -> None:
        super().__init__(complaint)
        self.complaint = complaint
        self.wanted = wanted
        self.path: list[object] = []


def _mismatch(value: Any, wanted: str) -> _Mismatch:
    return _Mismatch(f"is {_short_repr(value)}; must be {wanted}", wanted)


_Checker = Callable[[Any], None]


@functools.cache
def _checker(form: Form) -> _Checker:
    """Return a function that raises _Mismatch for a value that does not match ``form``."""
    origin: Any = typing.get_origin(form)
    arguments = typing.get_args(form)
    if form is Any:
        return lambda value: None
    if origin is Annotated:
        return _narrowed(_checker(arguments[0]), [each for each in arguments[1:] if isinstance(each, Must)])
    if origin is NotRequired:
        return _checker(arguments[0])
    if origin in (Union, types.UnionType):
        return _one_of([_checker(each) for each in arguments])
    if origin is Literal:
        return _literal(arguments)
    if typing.is_typeddict(form):
        hints = typing.get_type_hints(form, include_extras=True)
        return _record(hints, {name for name, hint in hints.items() if typing.get_origin(hint) is NotRequired})
    if dataclasses.is_dataclass(form) and isinstance(form, type):
        missing = dataclasses.MISSING
        optional = {
            each.name
            for each in dataclasses.fields(form)
            if each.default is not missing or each.default_factory is not missing
        }
        return _record(typing.get_type_hints(form, include_extras=True), optional)
    if origin is dict:
        return _mapping(*map(_checker, arguments))
    if origin is list:
        return _items(list, _checker(arguments[0]))
    if origin is tuple and arguments[1:] == (...,):
        return _items(tuple, _checker(arguments[0]))
    if origin is tuple:
        return _row([_checker(each) for each in arguments])
    return _instance(type(None) if form is None else origin or form)


def _instance(kind: type) -> _Checker:
    if kind is int:
        return _checked(lambda value: type(value) is int and _SMALLEST <= value <= _LARGEST, "a 64-bit integer")
    if kind is float:
        return _checked(_is_number, "a number")
    names = {bool: "true or false", str: "a text", type(None): "None", bytes: "bytes"}
    return _checked(lambda value: isinstance(value, kind), names.get(kind, f"a {kind.__name__}"))


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a float, including NumPy's, or an int that converts to one."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isinstance(float(value), float)
    except OverflowError:
        return False


def _literal(allowed: tuple[object, ...]) -> _Checker:
    words = " or ".join(map(repr, allowed))
    return _checked(lambda value: any(type(value) is type(each) and value == each for each in allowed), words)


def _checked(fits: Callable[[Any], object], words: str) -> _Checker:
    def check_value(value: Any) -> None:
        if not fits(value):
            raise _mismatch(value, words)

    return check_value


def _narrowed(check_type: _Checker, further: list[Must]) -> _Checker:
    def check_value(value: Any) -> None:
        check_type(value)
        for must in further:
            try:
                fits = must.fits(value)
            except Exception as error:
                raise _mismatch(value, must.words) from error
            if not fits:
                raise _mismatch(value, must.words)

    return check_value


def _one_of(checkers: list[_Checker]) -> _Checker:
    def check_value(value: Any) -> None:
        mismatches = []
        for each in checkers:
            try:
                return each(value)
            except _Mismatch as mismatch:
                mismatches.append(mismatch)
        wanted = [mismatch.wanted for mismatch in mismatches if mismatch.wanted and not mismatch.path]
        if len(wanted) == len(mismatches):  # every alternative rejects the value itself, not a part of it
            raise _mismatch(value, " or ".join(wanted))
        raise max(mismatches, key=lambda mismatch: (len(mismatch.path), not mismatch.wanted))

    return check_value


def _record(forms: Mapping[str, Form], optional: set[str]) -> _Checker:
    checkers = {name: _checker(form) for name, form in forms.items()}
    required, keys = checkers.keys() - optional, ", ".join(checkers)

    def check_value(value: Any) -> None:
        if not isinstance(value, dict):
            raise _mismatch(value, f"a dict with the keys {keys}")
        for name in checkers:
            if name in required and name not in value:
                raise _Mismatch(f"has no {name!r}; its keys must be {keys}")
        for name, each in value.items():
            if name not in checkers:
                raise _Mismatch(f"has the unknown key {_short_repr(name)}; its keys must be {keys}")
            _inside(checkers[name], each, name)

    return check_value


def _mapping(check_key: _Checker, check_item: _Checker) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, dict):
            raise _mismatch(value, "a dict")
        for key, each in value.items():
            check_key(key)
            _inside(check_item, each, key)

    return check_value


def _items(kind: type[list[Any] | tuple[Any, ...]], check_item: _Checker) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, kind):
            raise _mismatch(value, f"a {kind.__name__}")
        for number, each in enumerate(value):
            _inside(check_item, each, number)

    return check_value


def _row(checkers: list[_Checker]) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(checkers):
            raise _mismatch(value, f"a tuple of {len(checkers)}")
        for number, each in enumerate(checkers):
            _inside(each, value[number], number)

    return check_value


def _inside(check_item: _Checker, value: Any, key: object) -> None:
    try:
        check_item(value)
    except _Mismatch as mismatch:
        mismatch.path.append(key)
        raise


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_short_repr(key)}]"


def _short_repr(value: Any) -> str:
    """Return a short text for a value of any size and content."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # printing its digits may take very long
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
