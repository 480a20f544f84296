"""Values of a configuration: converted to an annotation, and annotations in words."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dalsegno.stateful.annotations import LISTS, TABLES, UNCHECKED, Checker, Mismatch, Rules, checker_of, plain


def coerce(value: Any, annotation: Any) -> Any:
    """Convert ``value``, a number, string, list or table of a file, to the type of ``annotation``.

    A table becomes a dataclass, a list a tuple or set, a string a path or enum member. An annotation that cannot be
    resolved is not checked. Raises Mismatch if the value does not match.
    """
    return checker_of(annotation, _CONVERTING)(value)


def complaint(mismatch: Mismatch) -> str:
    """The part of a value that does not match, and what is needed: ``.begin='x'; needs int``."""
    steps = [f"[{step[0]!r}]" if isinstance(step, tuple) else f"[{step}]" if isinstance(step, int) else f".{step}"
             for step in reversed(mismatch.path)]  # fmt: skip
    return f"{''.join(steps)}={mismatch.value!r}; {mismatch.complaint or f'needs {mismatch.wanted}'}"


def _scalar(kind: Any) -> Checker:
    def convert(value: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if isinstance(kind, type) and not (isinstance(value, bool) and kind in (int, float)):
            if isinstance(value, kind):
                return value
            if isinstance(value, str) and issubclass(kind, Path):
                return kind(value)
            if issubclass(kind, Enum):
                return _member(value, kind)
        raise Mismatch(value, describe(kind) + _hint(value, [kind]))

    return convert


def _member(value: Any, kind: type[Enum]) -> Enum:
    for member in kind:
        if value in (member.value, member.name):
            return member
    raise Mismatch(value, kind.__name__, f"allowed: {', '.join(repr(member.value) for member in kind)}")


def _hint(value: object, kinds: Sequence[Any]) -> str:
    """Hint at a YAML value that was parsed as another type than its author meant."""
    if isinstance(value, bool) and str in kinds:
        return f"; put it in quotes (YAML reads an unquoted {'yes or on' if value else 'no or off'} as {value})"
    if isinstance(value, str) and (float in kinds or int in kinds):
        try:
            float(value)
        except ValueError:
            return ""
        return "; this is a string: write it without quotes, and in YAML with a decimal point, 1.0e-3"
    return ""


def describe(annotation: Any) -> str:
    """An annotation in words: ``int or None``, ``list of str``."""
    annotation = plain(annotation)
    if get_origin(annotation) is Annotated:
        return describe(get_args(annotation)[0])
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind in UNCHECKED:
        return "anything"
    if kind is None or kind is types.NoneType:
        return "None"
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind in (Union, types.UnionType):
        return " or ".join(describe(each) for each in inner)
    if kind is tuple and inner and inner[-1] is not ...:
        return f"a list of {', '.join(describe(each) for each in inner)}"
    if kind in LISTS:
        return f"a list of {describe(inner[0])}" if inner else "a list"
    if kind in TABLES:
        return f"a table of {describe(inner[1])}" if inner else "a table"
    if is_dataclass(kind):
        return f"a table with {', '.join(field.name for field in fields(kind) if field.init)}"
    return str(getattr(kind, "__name__", kind))


_CONVERTING = Rules(_scalar, converts=True, listing="allowed: ", describe=describe, hint=_hint)
