"""Policy: what rules about saving and keeping have in common. They are joined with ``|``, and read as they are written.

The notation is Python's own, so that a rule in a program, in a log and in a configuration file looks the same::

    Every(steps=500) | Every(minutes=30) | OnBest()
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName

_RULE = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_ARGUMENT = re.compile(r"""\s*(?:(\w+)\s*=\s*)?("[^"]*"|'[^']*'|[^\s"']+)\s*""")


class Policy:
    """Base of the rules, each a dataclass. It shows the arguments that are not the default."""

    __slots__ = ()

    def __repr__(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        shown = [f"{name}={value!r}" for name, value in told.items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"


def read_policies(text: str, known: Iterable[type[Policy]]) -> list[Policy]:
    """The rules in a text: only names that are known, numbers and quoted words; nothing is evaluated.

    Raises:
        UnknownName: for a rule, or an argument, that does not exist.
        ConfigurationError: if it is not written so, or an argument has a value that cannot work.
    """
    kinds = {kind.__name__: kind for kind in known}
    rules = []
    for part in text.split("|"):
        rule = _RULE.fullmatch(part)
        if rule is None:
            example = " | ".join(f"{name}(…)" for name in kinds)
            raise ConfigurationError(f"{text!r}: {part.strip()!r} is no rule; write for example {example}")
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
    for place, each in enumerate(written.split(",") if written.strip() else []):
        argument = _ARGUMENT.fullmatch(each)
        if argument is not None and argument[1] is None and takes_any_number:
            values.append(_value(argument[2]))
            continue
        if argument is None or (argument[1] is None and place >= len(known)):
            raise ConfigurationError(f"{name}({written}): {each.strip()!r} is no argument; known: {', '.join(known)}")
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


def _value(text: str) -> int | float | str:
    if text[0] in "\"'":
        return text[1:-1]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
