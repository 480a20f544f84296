"""Argument checks for callbacks' constructors; error messages name callback, argument, and what is allowed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dalsegno.errors import ConfigurationError, expect_known

T = TypeVar("T")
Spec = dict[str, Any]
"""Of a column, a metric or a curve."""


def whole(owner: str, name: str, value: int, least: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs an integer of at least {least}")
    return value


def number(
    owner: str, name: str, value: float, *, over: float = -math.inf, least: float = -math.inf, under: float = math.inf
) -> float:
    """Return ``value`` if it is a finite number above ``over``, at least ``least``, and below ``under``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and over < value < under and value >= least):
        limit = f" over {over:g}" if over > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        limit += f" and below {under:g}" if under < math.inf else ""
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a finite number{limit}")
    return value


def flag(owner: str, name: str, value: bool) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{owner}: {name}={value!r}; allowed are True and False")
    return value


def one_of(owner: str, name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of the allowed names; the error for another name suggests the nearest."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{owner}: {name}={value!r}; allowed are {', '.join(map(repr, allowed))}")
    expect_known(f"{owner}: {name}", [value], allowed)
    return value


def text(owner: str, name: str, value: str) -> str:
    """Return ``value`` if it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a string")
    return value


def texts(owner: str, name: str, value: str | Iterable[str]) -> list[str]:
    """Return ``value``, one string or several, as a list."""
    try:
        several = [value] if isinstance(value, str) else list(value)
    except TypeError:
        several = []
    if not several or not all(isinstance(each, str) and each for each in several):
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a string, or a list of strings")
    return several


def folder(owner: str, name: str, value: str | Path) -> Path:
    """Return ``value`` as the path of a directory."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a path")
    return Path(value)


def pattern(owner: str, name: str, value: str) -> re.Pattern[str]:
    """Compile ``value``, a regular expression."""
    try:
        return re.compile(text(owner, name, value))
    except re.error as error:
        raise ConfigurationError(f"{owner}: {name}={value!r} is not a regular expression: {error}") from error


def mapping(owner: str, name: str, value: Mapping[str, T]) -> Mapping[str, T]:
    """Return ``value`` if it is a mapping with strings as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigurationError(f"{owner}: {name}={value!r}; needs a mapping with strings as keys")
    return value


def merge_specs(defaults: Mapping[str, Spec], given: Mapping[str, Any], short: str) -> dict[str, Spec]:
    """Merge ``given`` over ``defaults``, field by field; None removes a default, and new names come last. A value that
    is not a mapping is that of the field ``short``."""
    merged = {name: dict(spec) for name, spec in defaults.items()}
    for name, spec in given.items():
        if spec is None:
            merged.pop(name, None)
        else:
            merged.setdefault(name, {}).update(spec if isinstance(spec, Mapping) else {short: spec})
    return merged
