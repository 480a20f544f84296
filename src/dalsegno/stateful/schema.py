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

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Annotated, Any

from dalsegno.errors import DalsegnoError, StateMismatch

from .annotations import Checker, Mismatch, Rules, checker_of, short_repr
from .annotations import Form as Form
from .annotations import Must as Must

_LARGEST, _SMALLEST = (1 << 64) - 1, -(1 << 63)  # range of signed and unsigned 64-bit integers


Count = Annotated[int, Must("0 or more", lambda count: count >= 0)]
"""Steps, samples, bytes."""

Finite = Annotated[float, Must("a finite number", math.isfinite)]
"""Not NaN and not infinite."""


def check(value: Any, form: Form, where: str, error: Callable[[str], DalsegnoError] = StateMismatch) -> Any:
    """Validate ``value`` against ``form``. Returns it, with a dataclass made of each dict that ``form`` has a dataclass
    for. Raises StateMismatch (or the result of ``error``) naming the path of the first mismatch, the value and what is
    valid.

    Args:
        where: name of the value, e.g. ``step-00000500: rng``; the error adds the path inside it: ``rng.numpy[2]``.
        error: makes the error from the message.
    """
    try:
        return _checker(form)(value)
    except Mismatch as mismatch:
        path = "".join(_step(key) for key in reversed(mismatch.path))
        complaint = mismatch.complaint or f"is {short_repr(mismatch.value)}; must be {mismatch.wanted}"
        raise error(f"{where}{path}: {complaint}") from mismatch.__cause__


def _scalar(kind: Any) -> Checker:
    if kind is int:
        return _accepting(lambda value: type(value) is int and _SMALLEST <= value <= _LARGEST, "a 64-bit integer")
    if kind is float:
        return _accepting(_is_number, "a number")
    names = {bool: "true or false", str: "a text", type(None): "None", bytes: "bytes"}
    return _accepting(lambda value: isinstance(value, kind), names.get(kind, f"a {kind.__name__}"))


def _accepting(fits: Callable[[Any], object], words: str) -> Checker:
    def check_value(value: Any) -> Any:
        if not fits(value):
            raise Mismatch(value, words)
        return value

    return check_value


_EXACT = Rules(_scalar)


@functools.cache
def _checker(form: Form) -> Checker:
    return checker_of(form, _EXACT)


def check_like(value: Any, example: Any, where: str) -> None:
    """Validate a state without a schema against an example, such as the present state.

    Any number matches a number, a list matches a tuple, and None matches a bool. Items and keys that both sides have
    are compared: there may be more parameter groups now, or other names. Two tuples must have the same length. If the
    example is None, a string, or not plain data, any value matches. Raises StateMismatch naming the path of the first
    mismatch.
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


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a float, including NumPy's, or an int that converts to one."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isinstance(float(value), float)
    except OverflowError:
        return False


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{short_repr(key)}]"
