"""Records as lines of text: a table with columns (``show``), or ``name value`` pairs (``tail``)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from dalsegno.analysis.blocks import is_number
from dalsegno.cli.tables import fitted, in_words, number, visible

KNOWN = ("run", "kind", "global_step", "epoch", "timestamp")
"""Fields of a record that are not metrics."""

NARROW = 10
"""Least width of a column, in characters."""


class RecordTable:
    """Prints one line per record, and a header before the first."""

    def __init__(self, metrics: Sequence[str] | None, *, several: bool) -> None:
        """
        Args:
            metrics: columns; None: the metrics of the first record, as many as fit a terminal, and all others as
                ``name value`` at the end of the line.
            several: whether the records belong to several runs.
        """
        self._metrics = metrics
        self._rest = metrics is None
        self._several = several
        self._begun = False
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def print(self, record: Mapping[str, Any]) -> None:
        if not self._begun:
            self._begin(record)
        run = [str(record["run"]).ljust(NARROW)] if self._several else []
        cells = [*run, record["kind"].ljust(5), f"{record['global_step']:,}".rjust(9), _cell(record, "epoch", 8)]
        if not self._rest or any(name in record for name in self._metrics or ()):
            cells += [_cell(record, name, _width_of(name)) for name in self._metrics or ()]
        if self._rest:
            words = in_words(_others(record, self._metrics or ()))
            print(fitted("  ".join([*cells, words]).rstrip(), self._width))
        else:
            print("  ".join(cells).rstrip())

    def _begin(self, record: Mapping[str, Any]) -> None:
        self._begun = True
        run = ["run".ljust(NARROW)] if self._several else []
        head = [*run, "kind".ljust(5), "step".rjust(9), "epoch".rjust(8)]
        if self._metrics is None:
            names = [name for name, value in _others(record, ()).items() if is_number(value)]
            self._metrics = _seen(names, len("  ".join(head)), self._width)
        print("  ".join([*head, *(visible(name).rjust(NARROW) for name in self._metrics)]).rstrip())


def as_words(record: Mapping[str, Any], metrics: Sequence[str] | None) -> str:
    """A record as ``step 120  loss 3.21  epoch 0.5``."""
    chosen = _others(record, ()) if metrics is None else {name: record[name] for name in metrics if name in record}
    kind = "" if record.get("kind", "train") == "train" else f"{record['kind']}  "
    epoch = f"  epoch {number(record['epoch'])}" if is_number(record.get("epoch")) else ""
    return f"{kind}step {record['global_step']:,}  {in_words(chosen)}{epoch}"


def _seen(names: Sequence[str], begin: int, width: int | None) -> list[str]:
    """The columns that fit a terminal, with two characters left for " …"."""
    ends = accumulate((_width_of(name) + 2 for name in names), initial=begin)
    return [name for name, end in zip(names, list(ends)[1:], strict=True) if width is None or end + 2 <= width]


def _width_of(name: str) -> int:
    return max(len(visible(name)), NARROW)


def _others(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in (*KNOWN, *names)}


def _cell(record: Mapping[str, Any], name: str, width: int) -> str:
    value = record.get(name)
    return (
        "".rjust(width) if value is None else (number(value) if is_number(value) else visible(str(value))).rjust(width)
    )
