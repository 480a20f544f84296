"""Conditions on records, parsed from text: ``loss > 3 and step < 500``.

A condition compares a field with a number or a string (``kind == eval``) by ``<``, ``<=``, ``>``, ``>=``, ``==`` or
``!=``; ``and``, ``or``, ``not`` and parentheses combine conditions. ``step`` and ``time`` are short for
``global_step`` and ``timestamp``. ``nan`` and ``inf`` are numbers, and ``nan`` equals itself. A record that lacks the
field, or has a value of another type, satisfies only ``!=``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.errors import ConfigurationError

Holds = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class Condition:
    """A predicate on records."""

    names: tuple[str, ...]
    """Fields it compares."""
    holds: Holds

    def __call__(self, record: Mapping[str, Any]) -> bool:
        return self.holds(record)


_TOKENS = re.compile(
    r"\s*(?:(?P<compare><=|>=|==|!=|=|<|>)|(?P<bracket>[()])|\"(?P<quoted>[^\"]*)\"|(?P<word>[^\s<>=!()\"]+))"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
}
_SHORT = {"step": "global_step", "time": "timestamp"}
_JOINING = ("and", "or", "not")


def parse_condition(text: str) -> Condition:
    """Raises ConfigurationError for a syntax error; the message gives its position."""
    parser = _Parser(text, _tokens(text))
    holds = parser.either()
    parser.expect_end()
    return Condition(tuple(dict.fromkeys(parser.names)), holds)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    place: int


def _tokens(text: str) -> list[_Token]:
    tokens, place = [], 0
    while text[place:].strip():
        match = _TOKENS.match(text, place)
        if match is None:
            raise _wrong(text, len(text) - len(text[place:].lstrip()), "unexpected character")
        kind = match.lastgroup or ""
        tokens.append(_Token(kind, match[kind], match.start(kind)))
        place = match.end()
    return tokens


class _Parser:
    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self._text = text
        self._tokens = tokens
        self.names: list[str] = []

    def either(self) -> Holds:
        conditions = [self._both()]
        while self._take("word", "or"):
            conditions.append(self._both())
        return conditions[0] if len(conditions) == 1 else lambda record: any(each(record) for each in conditions)

    def expect_end(self) -> None:
        if self._tokens:
            raise _wrong(self._text, self._tokens[0].place, "'and' or 'or' expected")

    def _both(self) -> Holds:
        conditions = [self._single()]
        while self._take("word", "and"):
            conditions.append(self._single())
        return conditions[0] if len(conditions) == 1 else lambda record: all(each(record) for each in conditions)

    def _single(self) -> Holds:
        if self._take("word", "not"):
            inner = self._single()
            return lambda record: not inner(record)
        if self._take("bracket", "("):
            inner = self.either()
            self._need("bracket", ")")
            return inner
        name = self._operand("a field name")
        compare = _COMPARE[self._need("compare").text]
        value = _value(self._operand("a number or a string"))
        self.names.append(_SHORT.get(name.text, name.text))
        return _comparison(self.names[-1], compare, value)

    def _operand(self, what: str) -> _Token:
        token = self._take("quoted") or self._take("word")
        if token is None or (token.kind == "word" and token.text in _JOINING):
            raise _wrong(self._text, token.place if token else self._place(), f"{what} expected")
        return token

    def _need(self, kind: str, text: str | None = None) -> _Token:
        token = self._take(kind, text)
        if token is None:
            raise _wrong(self._text, self._place(), f"{text!r} expected" if text else "<, <=, >, >=, == or != expected")
        return token

    def _take(self, kind: str, text: str | None = None) -> _Token | None:
        if self._tokens and self._tokens[0].kind == kind and text in (None, self._tokens[0].text):
            return self._tokens.pop(0)
        return None

    def _place(self) -> int:
        return self._tokens[0].place if self._tokens else len(self._text)


def _comparison(name: str, compare: Callable[[Any, Any], bool], value: float | str) -> Holds:
    def holds(record: Mapping[str, Any]) -> bool:
        found = record.get(name)
        if isinstance(found, str) and isinstance(value, str):
            return compare(found, value)
        if isinstance(found, (int, float)) and isinstance(value, float):
            both_nan = math.isnan(found) and math.isnan(value)
            return compare in (operator.eq, operator.le, operator.ge) if both_nan else compare(found, value)
        return compare is operator.ne

    return holds


def _value(token: _Token) -> float | str:
    try:
        return token.text if token.kind == "quoted" else float(token.text)
    except ValueError:
        return token.text


def _wrong(text: str, place: int, what: str) -> ConfigurationError:
    return ConfigurationError(f"condition {text!r}, at character {place + 1}: {what}; example: loss > 3 and step < 500")
