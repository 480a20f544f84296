"""Annotations: resolved, put into words, and values of a configuration coerced to them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dalsegno.errors import ConfigurationError, UnknownName

_UNCHECKED = (Any, object, Parameter.empty)
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    **dict.fromkeys((list, Sequence, MutableSequence, Iterable, Collection), list),
    tuple: tuple,
    set: set,
    Set: set,
    frozenset: frozenset,
}
_TABLES = (dict, Mapping, MutableMapping)


class Mismatch(Exception):
    """A value does not match its annotation. Has the path inside the value, the value there, and what is needed."""

    def __init__(self, value: object, needs: str, path: str = "") -> None:
        super().__init__(f"{path}={value!r}; {needs}")
        self.value = value
        self.needs = needs
        self.path = path

    def inside(self, step: str) -> Mismatch:
        """The same mismatch, seen from the container."""
        return Mismatch(self.value, self.needs, step + self.path)


def coerce(value: Any, annotation: Any) -> Any:
    """Convert ``value``, a number, string, list or table of a file, to the type of ``annotation``.

    A table becomes a dataclass, a list a tuple or set, a string a path or enum member. An annotation that cannot be
    resolved is not checked.

    Raises:
        Mismatch: if the value does not match.
    """
    annotation = _plain(annotation)
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind in _UNCHECKED or isinstance(kind, (str, ForwardRef, TypeVar)):
        return value
    if kind is Literal:
        return _coerce_literal(value, inner)
    if kind in (Union, types.UnionType):
        return _coerce_union(value, inner)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return _build_dataclass(value, kind)
    if isinstance(value, (list, tuple)) and kind in _LISTS:
        return _coerce_list(list(value), kind, inner)
    if isinstance(value, Mapping) and kind in _TABLES:
        of_key, of_value = inner or (Any, Any)
        return {_key(key, of_key): _at(f"[{key!r}]", each, of_value) for key, each in value.items()}
    return _coerce_scalar(value, kind, describe(annotation))


def _plain(annotation: Any) -> Any:
    """The annotation behind ``Annotated``, ``NewType`` and aliases."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def _coerce_scalar(value: Any, kind: Any, needed: str) -> Any:
    if kind is None:
        kind = types.NoneType
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, bool) and kind in (int, float):
        raise Mismatch(value, f"needs {needed}")
    if isinstance(kind, type):
        if isinstance(value, kind) and not (isinstance(value, (str, bytes)) and kind in _LISTS):
            return value
        if isinstance(value, str) and issubclass(kind, Path):
            return kind(value)
        if issubclass(kind, Enum):
            return _member(value, kind)
    raise Mismatch(value, f"needs {needed}{_hint(value, kind)}")


def _member(value: Any, kind: type[Enum]) -> Enum:
    for member in kind:
        if value in (member.value, member.name):
            return member
    raise Mismatch(value, f"allowed: {', '.join(repr(member.value) for member in kind)}")


def _coerce_literal(value: Any, allowed: tuple[Any, ...]) -> Any:
    for each in allowed:
        if type(each) is type(value) and each == value:
            return each
    raise Mismatch(value, f"allowed: {', '.join(map(repr, allowed))}{_hint(value, type(allowed[0]))}")


def _coerce_union(value: Any, members: tuple[Any, ...]) -> Any:
    if type(value) in members:
        return value
    tables = [member for member in members if is_dataclass(_plain(member))]
    if isinstance(value, Mapping) and len(tables) == 1:
        return coerce(value, tables[0])
    mismatches = []
    for member in members:
        try:
            return coerce(value, member)
        except Mismatch as mismatch:
            mismatches.append(mismatch)
    deepest = max(mismatches, key=lambda mismatch: len(mismatch.path))
    if deepest.path:  # the container matches this member, and one of its values does not
        raise deepest
    wanted = " or ".join(describe(member) for member in members)
    raise Mismatch(value, f"needs {wanted}{_hint(value, *members)}")


def _coerce_list(values: list[Any], kind: Any, inner: tuple[Any, ...]) -> Any:
    if kind is not tuple or inner[1:] == (...,) or not inner:
        inner = (inner[0] if inner else Any,) * len(values)
    elif len(values) != len(inner):
        raise Mismatch(values, f"needs {len(inner)} values, {', '.join(map(describe, inner))}")
    pairs = enumerate(zip(values, inner, strict=True))
    return _LISTS[kind]([_at(f"[{index}]", each, of) for index, (each, of) in pairs])


def _build_dataclass(table: Mapping[str, Any], kind: type) -> Any:
    known = {field.name: field for field in fields(kind) if field.init}
    hints = hints_of(kind.__init__)  # type: ignore[misc]
    for key in table:
        if key not in known:
            raise Mismatch(dict(table), str(UnknownName(f"key for {kind.__name__}:", key, known)))
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise Mismatch(dict(table), f"{kind.__name__} needs {name}")
    arguments = {key: _at(f".{key}", value, hints.get(key, Any)) for key, value in table.items()}
    try:
        return kind(**arguments)
    except ConfigurationError as error:
        raise Mismatch(dict(table), str(error)) from error


def _at(step: str, value: Any, annotation: Any) -> Any:
    try:
        return coerce(value, annotation)
    except Mismatch as mismatch:
        raise mismatch.inside(step) from None


def _key(key: Any, annotation: Any) -> Any:
    try:
        return coerce(key, annotation)
    except Mismatch as mismatch:
        raise Mismatch(key, f"as a key, {mismatch.needs}") from None


def _hint(value: Any, *kinds: Any) -> str:
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
    annotation = _plain(annotation)
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind in _UNCHECKED:
        return "anything"
    if kind is None or kind is types.NoneType:
        return "None"
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind in (Union, types.UnionType):
        return " or ".join(describe(each) for each in inner)
    if kind is tuple and inner and inner[-1] is not ...:
        return f"a list of {', '.join(describe(each) for each in inner)}"
    if kind in _LISTS:
        return f"a list of {describe(inner[0])}" if inner else "a list"
    if kind in _TABLES:
        return f"a table of {describe(inner[1])}" if inner else "a table"
    if is_dataclass(kind):
        return f"a table with {', '.join(field.name for field in fields(kind) if field.init)}"
    return str(getattr(kind, "__name__", kind))


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name → annotation of a function, without those that cannot be resolved: one that only a type checker can resolve
    affects no other."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    names = getattr(function, "__globals__", vars(module) if module else {})
    resolved: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            resolved |= get_type_hints(alone, names, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return resolved
