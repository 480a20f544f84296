"""Arguments of callbacks, checked when one is built; messages name callback, argument, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from dalsegno.errors import ConfigurationError, UnknownName

T = TypeVar("T")


def whole(owner: str, name: str, value: int, least: int = 1) -> int:
    """``value``, a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a whole number of at least {least}")
    return value


def number(owner: str, name: str, value: float, *, over: float = -math.inf, least: float = -math.inf) -> float:
    """``value``, a finite number over ``over`` and of at least ``least``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > over and value >= least):
        limit = f" over {over:g}" if over > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a finite number{limit}")
    return value


def flag(owner: str, name: str, value: bool) -> bool:
    """``value``, True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{owner}: {name}={value!r}; allowed are True and False")
    return value


def one_of(owner: str, name: str, value: str, allowed: Sequence[str]) -> str:
    """``value``, one of the names allowed; the nearest is suggested for another."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{owner}: {name}={value!r}; allowed are {', '.join(map(repr, allowed))}")
    if value not in allowed:
        raise UnknownName(f"{owner}: {name}", value, allowed)
    return value


def writer(owner: str, value: Any, *needed: str) -> Any:
    """``value``, an object with torch's methods to write for TensorBoard, or None."""
    missing = [] if value is None else [name for name in needed if not hasattr(value, name)]
    if missing:
        raise ConfigurationError(f"{owner}: summary_writer={value!r}; it has no {missing[0]}")
    return value
