"""NaN and infinite numbers, which JSON lacks: replaced by placeholder numbers while Polars reads the lines.

The placeholders are then replaced in the numeric columns. If their number differs from those inserted, one is a value
of the log itself, or within a string or list; such lines must be read one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

Counts = Mapping[bytes, int]
"""Number of placeholders for each word."""

_PLACEHOLDERS = {
    b"-Infinity": (-math.inf, -(2.0**-1001)),
    b"Infinity": (math.inf, -(2.0**-1002)),
    b"NaN": (math.nan, -(2.0**-1003)),
}
"""Word → (value, placeholder). Placeholders are powers of two, which every reader parses exactly."""

_BEFORE = re.compile(rb':[ \t]*"?$')
_END_OF_NAME = rb'[^"]*"[ \t]*:'
"""Follows a placeholder in a name. What follows a value is a line's end, or the beginning of a name."""
_LOOK = 8
"""Bytes before a word that show whether it is a value."""


def insert_placeholders(lines: bytes) -> tuple[bytes, Counts]:
    """Replace non-finite values, bare as Python's json writes them or quoted as dalsegno does."""
    counts: dict[bytes, int] = {}
    for word, (_, number) in _PLACEHOLDERS.items():
        place = 0
        while (place := _find(lines, word, place)) >= 0:
            spelled = _value_at(lines, word, place)
            if spelled is None:
                place += len(word)
                continue
            before, placeholder = len(lines), spelled.replace(b'"', b"").replace(word, repr(number).encode())
            lines = lines.replace(spelled, placeholder)
            counts[word] = counts.get(word, 0) + (len(lines) - before) // (len(placeholder) - len(spelled))
    return lines, counts


def restore_values(frame: pl.DataFrame, lines: bytes, counts: Counts) -> pl.DataFrame | None:
    """The frame of ``lines``, which contain the placeholders, with the original values; None if they are ambiguous."""
    import polars as pl

    numbers = [name for name, kind in frame.schema.items() if kind == pl.Float64]
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    for word, count in counts.items():
        meant, number = _PLACEHOLDERS[word]
        in_names = re.search(re.escape(repr(number)).encode() + _END_OF_NAME, lines)
        in_texts = any(frame[name].str.contains(repr(number), literal=True).any() for name in texts)
        if in_names or in_texts or sum(int((frame[name] == number).sum()) for name in numbers) != count:
            return None
        there = (pl.when(pl.col(name) == number).then(meant).otherwise(pl.col(name)).alias(name) for name in numbers)
        frame = frame.with_columns(there)
    return frame


def _find(lines: bytes, word: bytes, begin: int) -> int:
    first = word.lstrip(b"-")[:1]  # a single byte is found ten times as fast
    return lines.find(word, begin) if lines.find(first, begin) >= 0 else -1


def _value_at(lines: bytes, word: bytes, place: int) -> bytes | None:
    """The word at ``place`` as it is written, from the colon on; None if it is not a value."""
    before = _BEFORE.search(lines[max(0, place - _LOOK) : place])
    if before is None:
        return None
    quote = b'"' if before[0].endswith(b'"') else b""
    spelled = before[0] + word + quote
    begin = place - len(before[0])
    return spelled if lines[begin : begin + len(spelled)] == spelled else None
