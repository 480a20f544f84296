"""Columns: some of a log's names, in memory, as arrays of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import KINDS, Block


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers under one name in n records."""

    present: NDArray[np.bool_] | None
    """Which records have one: shape (n,); None if all have."""
    values: NDArray[np.float64]
    """Of those that have: shape (m,)."""

    def at(self, here: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """The values in these records (None: in all); NaN where there is none."""
        if self.present is None:
            values = self.values
        else:
            values = np.full(len(self.present), np.nan)
            values[self.present] = self.values
        return values if here is None else values[here]


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
        here = self.kinds == KINDS.index(kind)
        if column.present is None:
            return Column(here, column.values[here])
        return Column(here & column.present, column.values[here[column.present]])


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
        columns.setdefault(name, Column(np.zeros(total, np.bool_), np.array([])))
    return Columns(np.concatenate([np.array([], np.uint8), *kinds]), columns, list(names))


def _column(pieces: list[tuple[int, NDArray[np.float64], NDArray[np.bool_]]], total: int) -> Column:
    values = np.concatenate([values for _, values, _ in pieces])
    values.setflags(write=False)  # series show it, and it is kept
    if len(values) == total:
        return Column(None, values)
    present = np.zeros(total, np.bool_)
    for begin, _, here in pieces:
        present[begin : begin + len(here)] = here
    return Column(present, values)
