"""``metrics.csv`` of Lightning's CSVLogger: one row per record, empty cells for missing metrics."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence

from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record

from .source import Naming, Skipped, Source, named, no_step


class MetricsCsv(Source):
    """Raises ConfigurationError on reading, if it has no column with the name of a step."""

    program = "Lightning"

    def records(self, skipped: Skipped) -> Iterator[Record]:
        with self.path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = _whole_lines(file, skipped)
            names = next(csv.reader(lines), [])
            if not names:
                return
            naming = Naming.of(dict.fromkeys(names, 0), self.step_key)
            if naming is None:
                raise ConfigurationError(no_step(self.path, names, self.step_key))
            yield from named(_rows(lines, names, skipped), naming, skipped)


def _rows(lines: Iterator[str], names: Sequence[str], skipped: Skipped) -> Iterator[tuple[int, Record]]:
    """The rows below the names, each with its line number."""
    for number, row in enumerate(csv.reader(lines), start=2):
        if len(row) == len(names):
            yield number, {name: _value(text) for name, text in zip(names, row, strict=True) if text}
        else:
            skipped.note(f"line {number}: {len(row)} fields under {len(names)} names")


def _whole_lines(file: Iterable[str], skipped: Skipped) -> Iterator[str]:
    """Drop a last line without a line end: its last number may be incomplete."""
    for number, line in enumerate(file, start=1):
        if line.endswith("\n"):
            yield line
        else:
            skipped.note(f"line {number}: torn")


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
