"""Policies: when to save, which checkpoints to keep, how to recover. Here: their base classes, and their notation.

Each raises ConfigurationError for a value that cannot work.

The notation is Python's own, so that a policy looks the same in a program, a log and a configuration file::

    Every(steps=500) | Every(minutes=30) | OnBest()
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dalsegno.errors import ConfigurationError, expect_known

P = TypeVar("P", bound="Policy")

_WORD = re.compile(r"""("[^"]*"|'[^']*')|[^\s"'=,|()\[\]{}]+(?=\s*[,)])""")
"""A value without quotes, such as ``1f1b``, ``layers.*`` or ``eval/loss``; or, as the group, a quoted string."""


class Policy:
    """Base of the policies, which are dataclasses. ``repr`` shows the arguments that differ from their defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        shown = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False, init=False)
class ListedSteps(Policy):
    """Base of the policies that list steps, ascending."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps or not all(type(step) is int and step > 0 for step in steps):
            given = f"{type(self).__name__}({', '.join(map(repr, steps))})"
            raise ConfigurationError(f"{given}: needs integers of at least 1")
        object.__setattr__(self, "steps", tuple(sorted({*steps})))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.steps))})"


@dataclass(frozen=True, slots=True, repr=False)
class Joined(Policy):
    """Base of several policies of a kind, joined with ``|``."""

    parts: tuple[Any, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def parts_of(given: object, base: type[P], known: Sequence[type[P]], what: str) -> tuple[P, ...]:
    """Return the single policies of user input: a policy of the kind ``base``, its text, or a list of either.

    Raises ConfigurationError for any other input, and for an empty list. ``what``: name of the kind in the message.
    """
    if isinstance(given, base):
        return given.parts if isinstance(given, Joined) else (given,)
    if isinstance(given, str):
        given = read_policies(given, known)
    if not isinstance(given, Sequence) or not given:
        names = ", ".join(map(_example, known))
        raise ConfigurationError(f"{given!r} is not a {what}; use {names}, or a list of several")
    return tuple(part for each in given for part in parts_of(each, base, known, what))


def check_integers(name: str, given: object, least: Mapping[str, int], *optional: str, hint: str = "") -> None:
    """Raises ConfigurationError if an attribute in ``least`` is neither an integer of at least that nor, if it is
    ``optional``, None."""
    for argument, smallest in least.items():
        value = getattr(given, argument)
        if not (value is None and argument in optional) and (type(value) is not int or value < smallest):
            needs = hint or f"an integer of at least {smallest}"
            raise ConfigurationError(f"{name}({argument}={value!r}): needs {needs}")


def read_policies(text: str, known: Iterable[type[P]]) -> list[P]:
    """Parse policies joined with ``|``: known names, numbers, words and quoted strings only; nothing is evaluated.
    Raises UnknownName for an unknown policy or argument; ConfigurationError for a syntax error, or an argument whose
    value cannot work."""
    kinds = {kind.__name__: kind for kind in known}
    try:
        rest = ast.parse(f"({_WORD.sub(_quoted, text)})", mode="eval").body  # a line break within is not the end
    except (SyntaxError, ValueError):  # the latter of a null character
        raise _not_a_rule(text, kinds) from None
    parts = []
    while isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.BitOr):
        parts.append(rest.right)
        rest = rest.left
    return [_read_rule(part, kinds) for part in (rest, *reversed(parts))]


def _read_rule(rule: ast.expr, kinds: Mapping[str, type[P]]) -> P:
    written = ast.unparse(rule)
    if not isinstance(rule, ast.Call) or not isinstance(rule.func, ast.Name):
        raise _not_a_rule(written, kinds)
    name = rule.func.id
    expect_known("rule", [name], kinds)
    accepted = inspect.signature(kinds[name]).parameters.values()
    known = [each.name for each in accepted if each.kind is not each.VAR_POSITIONAL]
    takes_any_number = len(known) < len(accepted)
    if len(rule.args) > len(known) and not takes_any_number:
        extra = ast.unparse(rule.args[len(known)])
        raise ConfigurationError(f"{written}: {extra!r} is not an argument; known: {', '.join(known)}")
    arguments: dict[str, Any] = {}
    for key, value in [*zip(known, rule.args, strict=False), *((str(each.arg), each.value) for each in rule.keywords)]:
        expect_known(f"argument of {name}", [key], known)
        if key in arguments:
            raise ConfigurationError(f"{written}: {key} is given twice")
        arguments[key] = _value(value, written)
    required = [each.name for each in accepted if each.default is each.empty and each.name in known]
    if missing := [each for each in required if each not in arguments]:
        raise ConfigurationError(f"{written}: needs {', '.join(missing)}")
    listed = [_value(each, written) for each in rule.args] if takes_any_number else []
    return kinds[name](*listed, **arguments)


def _quoted(found: re.Match[str]) -> str:
    word = found[0]
    if found[1]:
        return word
    try:
        ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return repr(word)
    return word


def _value(value: ast.expr, written: str) -> Any:
    try:
        found = ast.literal_eval(value)
    except (ValueError, TypeError):
        raise ConfigurationError(f"{written}: {ast.unparse(value)!r} is not a value; quote a text") from None
    return float(found) if found in ("inf", "-inf", "nan") else found


def _not_a_rule(text: str, kinds: Mapping[str, type[Policy]]) -> ConfigurationError:
    examples = " | ".join(map(_example, kinds.values()))
    return ConfigurationError(f"{text.strip()!r} is not a rule; write for example {examples}")


def _example(kind: type[Policy]) -> str:
    return f"{kind.__name__}({'…' if inspect.signature(kind).parameters else ''})"
