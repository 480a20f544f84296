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
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from dalsegno.errors import ConfigurationError

Holds = Callable[[Mapping[str, Any]], bool]


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


def parse_condition(text: str) -> tuple[Holds, list[str]]:
    """A predicate on records, and the fields that it compares.

    Raises ConfigurationError for a syntax error; the message gives its position.
    """
    parser = _Parser(text)
    holds = parser.either()
    parser.expect_end()
    return holds, parser.names


class _Parser:
    """Each method parses what binds closer than the one before it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: deque[tuple[str, str, int]] = deque()  # kind, text and place
        self.names: list[str] = []
        place = 0
        while text[place:].strip():
            match = _TOKENS.match(text, place)
            if match is None:
                self._fail("unexpected character", len(text) - len(text[place:].lstrip()))
            kind = match.lastgroup or ""
            self._tokens.append((kind, match[kind], match.start(kind)))
            place = match.end()

    def expect_end(self) -> None:
        if self._tokens:
            self._fail("'and' or 'or' expected")

    def either(self) -> Holds:
        return self._joined("or", any, self._both)

    def _both(self) -> Holds:
        return self._joined("and", all, self._single)

    def _joined(self, word: str, agree: Callable[[Iterable[bool]], bool], parse: Callable[[], Holds]) -> Holds:
        conditions = [parse()]
        while self._take("word", word):
            conditions.append(parse())
        return conditions[0] if len(conditions) == 1 else lambda record: agree(each(record) for each in conditions)

    def _single(self) -> Holds:
        if self._take("word", "not"):
            inner = self._single()
            return lambda record: not inner(record)
        if self._take("bracket", "("):
            inner = self.either()
            if not self._take("bracket", ")"):
                self._fail("')' expected")
            return inner
        _, name = self._operand("a field name")
        compare = self._take("compare") or self._fail("<, <=, >, >=, == or != expected")
        kind, text = self._operand("a number or a string")
        self.names.append(_SHORT.get(name, name))
        return _comparison(self.names[-1], _COMPARE[compare[1]], text if kind == "quoted" else _value(text))

    def _operand(self, what: str) -> tuple[str, str]:
        if self._tokens and self._tokens[0][0] == "word" and self._tokens[0][1] in _JOINING:
            self._fail(f"{what} expected")
        return self._take("quoted") or self._take("word") or self._fail(f"{what} expected")

    def _take(self, kind: str, text: str | None = None) -> tuple[str, str] | None:
        """Kind and text of the next token, if it is of this kind, and has this text."""
        if self._tokens and self._tokens[0][0] == kind and text in (None, self._tokens[0][1]):
            return self._tokens.popleft()[:2]
        return None

    def _fail(self, what: str, place: int | None = None) -> NoReturn:
        if place is None:
            place = self._tokens[0][2] if self._tokens else len(self._text)
        example = "example: loss > 3 and step < 500"
        raise ConfigurationError(f"condition {self._text!r}, at character {place + 1}: {what}; {example}")


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


def _value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
