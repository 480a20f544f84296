"""Row: one line of the table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

_FAILED = "failed: "
_LEADING_NUMBER = re.compile(r"-?(?:[\d.]+(?:e[-+]?\d+)?|inf|nan)")


@dataclass(frozen=True)
class Row:
    """One comparison. Texts are ready to be printed, with their units."""

    what: str
    ours: str
    peer: str
    """Who was measured beside us, and what it took; or why it was not."""
    ratio: str = ""
    """The smaller the better, unless the text says otherwise."""
    target: str = ""
    met: bool | None = None
    """None where there is no target, or no figure."""
    spread: float | None = None
    """Of the rounds' ratios, or of what ours took: see :class:`benchmarks.timing.Figure`. None: there were too few
    rounds."""

    @classmethod
    def failed(cls, name: str, error: Exception) -> Row:
        """In place of the rows of a benchmark that raised."""
        return cls(name, f"{_FAILED}{type(error).__name__}", "")

    @property
    def has_failed(self) -> bool:
        return self.ours.startswith(_FAILED)

    @property
    def is_impossible(self) -> bool:
        """Whether the ratio is zero, negative or not finite: then nothing was measured, whatever the row says."""
        number = _LEADING_NUMBER.match(self.ratio)
        return number is not None and not 0 < float(number[0]) < inf

    def cells(self) -> list[str]:
        return [
            self.what,
            self.ours,
            self.peer,
            self.ratio,
            "" if self.spread is None else f"± {100 * self.spread:.0f} %",
            self.target,
            "IMPOSSIBLE" if self.is_impossible else {True: "yes", False: "NO", None: ""}[self.met],
        ]


HEAD = ["what", "ours", "peer", "ratio", "spread", "target", "met?"]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table whose columns line up."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    printed = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    printed.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(printed)


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits: ``12.3 ns``, ``481 ns``, ``1.20 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def count(number: int) -> str:
    """``10 M`` or ``10 G``, where it is a round number; ``1,234`` otherwise."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number:,}"


def three_digits(number: float) -> str:
    if number < 0.1:
        return f"{number:.2g}"
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"
