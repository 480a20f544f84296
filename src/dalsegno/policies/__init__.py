"""Policies: when to save, which checkpoints to keep, how to recover. Here: their base class, and their notation.

The notation is Python's own, so that a policy looks the same in a program, a log and a configuration file::

    Every(steps=500) | Every(minutes=30) | OnBest()
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName

_QUOTED = r"""("[^"]*"|'[^']*')"""
_RULE = re.compile(rf"\s*(\w+)\s*\(((?:{_QUOTED}|[^()\"'])*)\)\s*")
_ARGUMENT = re.compile(rf"\s*(?:(\w+)\s*=\s*)?({_QUOTED}|[^\s\"']+)\s*")


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


def check_integers(name: str, given: object, least: Mapping[str, int], *optional: str, hint: str = "") -> None:
    """Raises ConfigurationError if an attribute in ``least`` is neither an integer of at least that nor, if it is
    ``optional``, None."""
    for argument, smallest in least.items():
        value = getattr(given, argument)
        if not (value is None and argument in optional) and (type(value) is not int or value < smallest):
            needs = hint or f"an integer of at least {smallest}"
            raise ConfigurationError(f"{name}({argument}={value!r}): needs {needs}")


def read_policies(text: str, known: Iterable[type[Policy]]) -> list[Policy]:
    """Parse policies joined with ``|``: known names, numbers and quoted strings only; nothing is evaluated. Raises
    UnknownName for an unknown policy or argument; ConfigurationError for a syntax error, or an argument whose value
    cannot work."""
    kinds = {kind.__name__: kind for kind in known}
    rules = []
    for part in _split(text, "|"):
        rule = _RULE.fullmatch(part)
        if rule is None:
            example = " | ".join(f"{name}(…)" for name in kinds)
            raise ConfigurationError(f"{part.strip()!r} is not a rule; write for example {example}")
        rules.append(_read_rule(rule[1], rule[2], kinds))
    return rules


def _read_rule(name: str, written: str, kinds: Mapping[str, type[Policy]]) -> Policy:
    if name not in kinds:
        raise UnknownName("rule", name, kinds)
    accepted = inspect.signature(kinds[name]).parameters.values()
    known = [each.name for each in accepted if each.kind is not each.VAR_POSITIONAL]
    takes_any_number = len(known) < len(accepted)
    values: list[Any] = []
    arguments: dict[str, Any] = {}
    for place, each in enumerate(_split(written, ",") if written.strip() else []):
        argument = _ARGUMENT.fullmatch(each)
        if argument is not None and argument[1] is None and takes_any_number:
            values.append(_value(argument[2]))
            continue
        if argument is None or (argument[1] is None and place >= len(known)):
            raise ConfigurationError(
                f"{name}({written}): {each.strip()!r} is not an argument; known: {', '.join(known)}"
            )
        key = argument[1] or known[place]
        if key not in known:
            raise UnknownName(f"argument of {name}", key, known)
        if key in arguments:
            raise ConfigurationError(f"{name}({written}): {key} is given twice")
        arguments[key] = _value(argument[2])
    required = [each.name for each in accepted if each.default is each.empty and each.name in known]
    if missing := [each for each in required if each not in arguments]:
        raise ConfigurationError(f"{name}({written}): needs {', '.join(missing)}")
    return kinds[name](*values, **arguments)


def _split(text: str, separator: str) -> list[str]:
    """The parts of ``text`` between separators, which do not count in quotes."""
    parts = [""]
    for piece in re.split(f"{_QUOTED}|([{separator}])", text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece or ""
    return parts


_CONSTANTS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}


def _value(text: str) -> int | float | str | bool | None:
    if text[0] in "\"'":
        return text[1:-1]
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
