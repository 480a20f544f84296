"""The form of what is read back, said by a type: a value is held against it before anything is done with it.

Whoever writes a state says its form beside ``state_dict``, with the types that also check the code that writes it::

    class ClockState(TypedDict):
        seconds: Annotated[float, Must("0 or more", lambda seconds: seconds >= 0)]

    class Clock:
        state_schema = ClockState

Understood are TypedDict (its keys and no others; ``NotRequired`` may be missing), dataclasses (as a dict of their
fields; one with a default may be missing), ``dict[K, V]``, ``list[X]``, ``tuple[X, Y]``, ``tuple[X, ...]``, ``X | Y``,
``Literal``, ``Any``, ``Annotated[X, Must(…)]``, and any class. An ``int`` is one of 64 bits and no bool; an ``int`` may
stand in the place of a ``float``.
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

_LARGEST, _SMALLEST = (1 << 64) - 1, -(1 << 63)  # what fits into 64 bits, with a sign or without
_LONGEST_SHOWN = 60  # characters


@dataclass(frozen=True, slots=True)
class Must:
    """What else is asked of a value, in words and as a function of one that has the right type already.

    Where ``fits`` raises, the value does not fit either.
    """

    words: str
    fits: Callable[[Any], object]


Count = Annotated[int, Must("0 or more", lambda count: count >= 0)]
"""Steps, samples, bytes."""

Finite = Annotated[float, Must("a finite number", math.isfinite)]
"""What is never NaN or infinite."""


def check(value: Any, form: Form, where: str, error: Callable[[str], DalsegnoError] = StateMismatch) -> None:
    """Hold ``value`` against ``form``.

    Args:
        where: what it is, say ``step-00000500: rng``; the error adds the path inside of it: ``rng.numpy[2]``.
        error: made of the message.

    Raises:
        StateMismatch: or what ``error`` makes; says where in it the first misfit lies, what is there and what must be.
    """
    try:
        _checker(form)(value)
    except _Misfit as misfit:
        path = "".join(_step(key) for key in reversed(misfit.path))
        raise error(f"{where}{path}: {misfit.complaint}") from misfit.__cause__


def check_like(value: Any, example: Any, where: str) -> None:
    """Hold ``value`` against one of its kind, where no type says its form: a state against the present one.

    Numbers may stand for numbers, lists for tuples, and None for a switch that is left to its owner. In a list or a
    dict what both have is alike: there may be more parameter groups now, or other names. Two tuples have one length.
    Where the example is None, a text, or something that is not plain data, anything may be.

    Raises:
        StateMismatch: says where in it the first misfit lies.
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
    """Whether it is a tensor or an array with a single number in it."""
    return hasattr(value, "dtype") and hasattr(value, "item") and math.prod(value.shape) == 1


class _Misfit(Exception):
    """``path`` is where, from the inside out; ``wanted`` is what should be there, where it is something else."""

    def __init__(self, complaint: str, wanted: str = "") -> None:
        super().__init__(complaint)
        self.complaint = complaint
        self.wanted = wanted
        self.path: list[object] = []


def _unlike(value: Any, wanted: str) -> _Misfit:
    return _Misfit(f"is {_shown(value)}; must be {wanted}", wanted)


_Checker = Callable[[Any], None]


@functools.cache
def _checker(form: Form) -> _Checker:
    """A function that raises _Misfit for a value that is not of that form."""
    origin: Any = typing.get_origin(form)
    arguments = typing.get_args(form)
    if form is Any:
        return lambda value: None
    if origin is Annotated:
        return _narrowed(_checker(arguments[0]), [each for each in arguments[1:] if isinstance(each, Must)])
    if origin in (Union, types.UnionType):
        return _one_of([_checker(each) for each in arguments])
    if origin is Literal:
        return _literal(arguments)
    if typing.is_typeddict(form):
        hints = typing.get_type_hints(form, include_extras=True)
        optional = {name: hint for name, hint in hints.items() if _is_optional(hint)}
        return _record(hints | {name: typing.get_args(hint)[0] for name, hint in optional.items()}, {*optional})
    if dataclasses.is_dataclass(form) and isinstance(form, type):
        fields = {each.name: each for each in dataclasses.fields(form)}
        return _record(
            typing.get_type_hints(form, include_extras=True),
            {name for name, each in fields.items() if _has_default(each)},
        )
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
        return _checked(
            lambda value: type(value) is int and _SMALLEST <= value <= _LARGEST, "a whole number of 64 bits"
        )
    if kind is float:
        return _checked(_is_number, "a number")
    names = {bool: "true or false", str: "a text", type(None): "None", bytes: "bytes"}
    return _checked(lambda value: isinstance(value, kind), names.get(kind, f"a {kind.__name__}"))


def _is_number(value: Any) -> bool:
    """Whether it is a float, NumPy's too, or an int that becomes one."""
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
            raise _unlike(value, words)

    return check_value


def _narrowed(check_type: _Checker, further: list[Must]) -> _Checker:
    def check_value(value: Any) -> None:
        check_type(value)
        for must in further:
            try:
                fits = must.fits(value)
            except Exception as error:
                raise _unlike(value, must.words) from error
            if not fits:
                raise _unlike(value, must.words)

    return check_value


def _one_of(checkers: list[_Checker]) -> _Checker:
    def check_value(value: Any) -> None:
        misfits = []
        for each in checkers:
            try:
                return each(value)
            except _Misfit as misfit:
                misfits.append(misfit)
        wanted = [misfit.wanted for misfit in misfits if misfit.wanted and not misfit.path]
        if len(wanted) == len(misfits):  # it is none of these at all
            raise _unlike(value, " or ".join(wanted))
        raise max(misfits, key=lambda misfit: (len(misfit.path), not misfit.wanted))

    return check_value


def _record(forms: Mapping[str, Form], optional: set[str]) -> _Checker:
    checkers = {name: _checker(form) for name, form in forms.items()}
    required, keys = checkers.keys() - optional, ", ".join(checkers)

    def check_value(value: Any) -> None:
        if not isinstance(value, dict):
            raise _unlike(value, f"a dict with the keys {keys}")
        for name in checkers:
            if name in required and name not in value:
                raise _Misfit(f"has no {name!r}; its keys must be {keys}")
        for name, each in value.items():
            if name not in checkers:
                raise _Misfit(f"has the unknown key {_shown(name)}; its keys must be {keys}")
            _inside(checkers[name], each, name)

    return check_value


def _mapping(check_key: _Checker, check_item: _Checker) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, dict):
            raise _unlike(value, "a dict")
        for key, each in value.items():
            check_key(key)
            _inside(check_item, each, key)

    return check_value


def _items(kind: type[list[Any] | tuple[Any, ...]], check_item: _Checker) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, kind):
            raise _unlike(value, f"a {kind.__name__}")
        for number, each in enumerate(value):
            _inside(check_item, each, number)

    return check_value


def _row(checkers: list[_Checker]) -> _Checker:
    def check_value(value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(checkers):
            raise _unlike(value, f"a tuple of {len(checkers)}")
        for number, each in enumerate(checkers):
            _inside(each, value[number], number)

    return check_value


def _inside(check_item: _Checker, value: Any, key: object) -> None:
    try:
        check_item(value)
    except _Misfit as misfit:
        misfit.path.append(key)
        raise


def _is_optional(hint: Form) -> bool:
    origin: Any = typing.get_origin(hint)
    return origin is NotRequired


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_shown(key)}]"


def _shown(value: Any) -> str:
    """A value for people, however large it is and whatever it holds."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # to write it out may take for ever
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
