"""Numbers that JSON lacks: others stand in for them while Polars reads the lines.

They are taken back from the columns of numbers. If there are more or fewer of them than were put in, one of them is a
value of the log itself, or stands in a text or a list: such lines are to be read one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

Counts = Mapping[bytes, int]
"""How often there is a stand-in for each word."""

_STAND_INS = {
    b"-Infinity": (-math.inf, -(2.0**-1001)),
    b"Infinity": (math.inf, -(2.0**-1002)),
    b"NaN": (math.nan, -(2.0**-1003)),
}
"""What a word says, and what stands in for it: powers of two, of which every reader makes the same number."""

_BEFORE = re.compile(rb':[ \t]*"?$')
_LOOK = 8
"""Bytes before a word by which a value is told."""


def put_in(lines: bytes) -> tuple[bytes, Counts]:
    """The lines with stand-ins for such values, bare as Python's json writes them, or quoted as we do."""
    counts: dict[bytes, int] = {}
    for word, (_, number) in _STAND_INS.items():
        place = 0
        while (place := _find(lines, word, place)) >= 0:
            spelled = _value_at(lines, word, place)
            if spelled is None:
                place += len(word)
                continue
            before, stand_in = len(lines), spelled.replace(b'"', b"").replace(word, repr(number).encode())
            lines = lines.replace(spelled, stand_in)
            counts[word] = counts.get(word, 0) + (len(lines) - before) // (len(stand_in) - len(spelled))
    return lines, counts


def take_out(frame: pl.DataFrame, counts: Counts) -> pl.DataFrame | None:
    """The frame with the numbers that were meant; None if that cannot be told."""
    import polars as pl

    numbers = [name for name, kind in frame.schema.items() if kind == pl.Float64]
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    for word, count in counts.items():
        meant, number = _STAND_INS[word]
        in_names = any(repr(number) in name for name in frame.columns)
        in_texts = any(frame[name].str.contains(repr(number), literal=True).any() for name in texts)
        if in_names or in_texts or sum(int((frame[name] == number).sum()) for name in numbers) != count:
            return None
        there = (pl.when(pl.col(name) == number).then(meant).otherwise(pl.col(name)).alias(name) for name in numbers)
        frame = frame.with_columns(there)
    return frame


def _find(lines: bytes, word: bytes, begin: int) -> int:
    first = word.lstrip(b"-")[:1]  # what is one byte long is found ten times as fast
    return lines.find(word, begin) if lines.find(first, begin) >= 0 else -1


def _value_at(lines: bytes, word: bytes, place: int) -> bytes | None:
    """How the word that is there is written, from the colon on; None if it is no value."""
    before = _BEFORE.search(lines[max(0, place - _LOOK) : place])
    if before is None:
        return None
    quote = b'"' if before[0].endswith(b'"') else b""
    spelled = before[0] + word + quote
    begin = place - len(before[0])
    return spelled if lines[begin : begin + len(spelled)] == spelled else None
