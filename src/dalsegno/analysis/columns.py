"""Columns: some of a log's names, in memory, as arrays of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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
    total: int
    """Records that there are, with a number or without."""

    def at(self, rows: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """The values in these records, ascending (None: in all); NaN where there is none."""
        if self.rows is None:
            return self.values if rows is None else self.values[rows]
        rows = np.arange(self.total) if rows is None else rows
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

    def count_kinds(self) -> dict[str, int]:
        """How many records there are of each kind; kinds that no record has are left out."""
        counts = np.bincount(self.kinds, minlength=len(KINDS) + 1).tolist()
        return {kind: count for kind, count in zip([*KINDS, "other"], counts, strict=True) if count}

    def of_kind(self, name: str, kind: str | None) -> Column:
        """The numbers under one name in the records of a kind (None: in all)."""
        column = self.columns[name]
        if kind is None:
            return column
        kinds = self.kinds if column.rows is None else self.kinds[column.rows]
        here = np.flatnonzero(kinds == KINDS.index(kind))
        return Column(here if column.rows is None else column.rows[here], column.values[here], column.total)


def read_columns(blocks: Iterable[Block], wanted: Collection[str], also: Callable[[str], bool]) -> Columns:
    """Read a log once, and keep the columns of these names, and of those that ``also`` is true of. Of the rest only a
    block at a time is in memory."""
    kinds: list[NDArray[np.uint8]] = []
    names: dict[str, None] = {}
    pieces: dict[str, list[tuple[int, NDArray[np.float64], NDArray[np.bool_]]]] = {}
    total = 0
    for block in blocks:
        here = block.numeric()
        names.update(dict.fromkeys(here))
        for name in [name for name in here if name in wanted or also(name)]:
            values, present = block.numbers(name)
            pieces.setdefault(name, []).append((total, values[present], present))
        kinds.append(block.kinds())
        total += len(block)
    columns = {name: _column(pieces.pop(name), total) for name in list(pieces)}
    for name in wanted:
        columns.setdefault(name, Column(np.array([], np.int64), np.array([]), total))
    return Columns(np.concatenate([np.array([], np.uint8), *kinds]), columns, list(names))


def _column(pieces: list[tuple[int, NDArray[np.float64], NDArray[np.bool_]]], total: int) -> Column:
    values = np.concatenate([values for _, values, _ in pieces])
    if len(values) == total:
        return Column(None, values, total)
    return Column(np.concatenate([begin + np.flatnonzero(present) for begin, _, present in pieces]), values, total)
