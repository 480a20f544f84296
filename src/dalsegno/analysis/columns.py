"""Columns: some of a log's names, in memory, as arrays of numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import KINDS, Block


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers under one name."""

    rows: NDArray[np.int64] | None
    """Which records have one, ascending: shape (m,); None if all have."""
    values: NDArray[np.float64]
    """Shape (m,)."""

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The values in these records, ascending; NaN where there is none."""
        if self.rows is None:
            return self.values[rows]
        found = np.full(len(rows), np.nan)
        places = np.searchsorted(self.rows, rows)
        known = np.flatnonzero(places < len(self.rows))
        known = known[self.rows[places[known]] == rows[known]]
        found[known] = self.values[places[known]]
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of n records."""

    kinds: NDArray[np.uint8]
    """Places in :data:`dalsegno.analysis.blocks.KINDS`: shape (n,)."""
    columns: dict[str, Column]
    names: list[str]
    """All names of numbers in the log, in the order of their first appearance: also of those that are not here."""

    def rows_of(self, name: str, kind: str | None) -> NDArray[np.int64]:
        """The records of a kind (None: of all) that have a number under this name."""
        rows = self.columns[name].rows
        rows = np.arange(len(self.kinds)) if rows is None else rows
        return rows if kind is None else rows[self.kinds[rows] == KINDS.index(kind)]


def read_columns(blocks: Iterable[Block], wanted: Collection[str] | None) -> Columns:
    """Read a log once, and keep the columns of these names, or all. Of the rest only a block at a time is in memory."""
    kinds: list[NDArray[np.uint8]] = []
    names: dict[str, None] = {}
    pieces: dict[str, list[tuple[int, NDArray[np.float64], NDArray[np.bool_]]]] = {}
    total = 0
    for block in blocks:
        here = block.numeric()
        names.update(dict.fromkeys(here))
        for name in here if wanted is None else [name for name in here if name in wanted]:
            values, present = block.numbers(name)
            pieces.setdefault(name, []).append((total, values[present], present))
        kinds.append(block.kinds())
        total += len(block)
    columns = {name: _column(pieces.pop(name), total) for name in list(pieces)}
    for name in wanted or ():
        columns.setdefault(name, Column(np.array([], np.int64), np.array([])))
    return Columns(np.concatenate([np.array([], np.uint8), *kinds]), columns, list(names))


def _column(pieces: list[tuple[int, NDArray[np.float64], NDArray[np.bool_]]], total: int) -> Column:
    values = np.concatenate([values for _, values, _ in pieces])
    if len(values) == total:
        return Column(None, values)
    return Column(np.concatenate([begin + np.flatnonzero(present) for begin, _, present in pieces]), values)
