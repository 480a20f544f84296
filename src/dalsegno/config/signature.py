"""Signature: the arguments of a class or function, with annotations, defaults and descriptions; and their values."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docstring_parser import ParseError
from docstring_parser.google import parse

from dalsegno.config.document import error_context
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.stateful.annotations import (
    LISTS,
    TABLES,
    UNCHECKED,
    Checker,
    Mismatch,
    Rules,
    checker_of,
    hints_of,
    plain,
)


def coerce(value: Any, annotation: Any) -> Any:
    """Convert ``value``, a number, string, list or table of a file, to the type of ``annotation``.

    A table becomes a dataclass, a list a tuple or set, a string a path or enum member. An annotation that cannot be
    resolved is not checked.
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


# --- the arguments --------------------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, str, type(None))
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that can be passed by name."""

    name: str
    annotation: Any
    default: Any
    doc: str
    """Description in the docstring; empty without one."""

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty


class Signature(dict[str, Argument]):
    """Name → argument, in order."""

    def __init__(self, arguments: list[Argument], others: Any, unnamed: str | None) -> None:
        """
        Args:
            others: annotation of ``**kwargs``; ``Parameter.empty`` without any.
            unnamed: a required positional-only parameter; None without any.
        """
        super().__init__((argument.name, argument) for argument in arguments)
        self.others = others
        self.takes_others = others is not Parameter.empty
        self._unnamed = unnamed

    def defaults(self) -> dict[str, Any]:
        """The defaults that a file can represent."""
        return {each.name: each.default for each in self.values() if isinstance(each.default, _PLAIN)}

    def check(
        self, given: Mapping[str, Any], location: Callable[[str], str], answers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Check ``given`` against the annotations and coerce its values.

        Args:
            location: gives the location of an argument, for error messages.
            answers: by an unknown name, the right one or advice.
        """
        for name in given:
            if name not in self and not self.takes_others:
                with error_context(location(name)):
                    raise UnknownName("argument", name, self, answers)
        if self._unnamed is not None:
            raise ConfigurationError(f"{location('')}: its parameter {self._unnamed!r} cannot be passed by name")
        for argument in self.values():
            if argument.required and argument.name not in given:
                raise ConfigurationError(
                    f"{location(argument.name)}: {argument.name}= is missing; needs {describe(argument.annotation)}"
                )
        found = {}
        for name, value in given.items():
            try:
                found[name] = coerce(value, self[name].annotation if name in self else self.others)
            except Mismatch as mismatch:
                raise ConfigurationError(f"{location(name)}: {name}{complaint(mismatch)}") from mismatch
        return found


def signature_of(made: Callable[..., Any]) -> Signature:
    """The signature of a class's constructor, or of a function."""
    function = _constructor(made) if isinstance(made, type) else made
    if function is None:
        return Signature([], Parameter.empty, None)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigurationError(f"{made!r}: its signature cannot be inspected; wrap it in a function") from error
    if isinstance(made, type):
        parameters = parameters[1:]
    hints, docs = hints_of(function), argument_docs(made)
    named = [
        Argument(each.name, hints.get(each.name, Any), each.default, docs.get(each.name, ""))
        for each in parameters
        if each.kind in _NAMED
    ]
    others = [hints.get(each.name, Any) for each in parameters if each.kind is Parameter.VAR_KEYWORD]
    unnamed = [
        each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY and each.default is Parameter.empty
    ]
    return Signature(named, others[0] if others else Parameter.empty, unnamed[0] if unnamed else None)


def _constructor(made: type) -> Callable[..., Any] | None:
    for name in ("__init__", "__new__"):
        function = getattr(made, name)
        if function is not getattr(object, name):
            return function  # type: ignore[no-any-return]
    return None


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Raises|Returns|Yields):$", re.MULTILINE)
_NAME = re.compile(r"`[^`]+`")
_ROLE = re.compile(r":\w+:(?=`)")


def prose(made: Callable[..., Any]) -> str:
    """The docstring up to its first section, without reStructuredText roles."""
    # not the parser's description: it unindents the first line of an example that follows the first sentence
    return _plain(_SECTION.split(inspect.getdoc(made) or "", maxsplit=1)[0].strip())


def summary(made: Callable[..., Any]) -> str:
    """The first sentence of :func:`prose`; if it introduces a list, with the names that the list explains."""
    first, _, rest = prose(made).partition("\n\n")
    sentence = re.split(r"(?<=\.)\s", " ".join(first.split()), maxsplit=1)[0]
    if not sentence.endswith(":"):
        return sentence
    listed = re.findall(r"^- ([^:]*):", rest.partition("\n\n")[0], re.MULTILINE)
    named = [name for item in listed for name in _NAME.findall(item)]
    return f"{sentence.rstrip(':')}: {', '.join(named)}." if named else f"{sentence.rstrip(':')}."


def argument_docs(made: Callable[..., Any]) -> dict[str, str]:
    """Argument → description, from the ``Args:`` of a function, or of a class and its constructor.

    The class's own description of an argument replaces one of its constructor, which may be inherited.
    """
    found = {}
    for source in [made.__init__, made] if isinstance(made, type) else [made]:  # type: ignore[misc]
        with contextlib.suppress(ParseError):  # another style
            for param in parse(inspect.getdoc(source) or "").params:
                found[param.arg_name.lstrip("*")] = _plain(" ".join((param.description or "").split()))
    return found


def _plain(text: str) -> str:
    return _ROLE.sub("", text).replace("``", "`")
