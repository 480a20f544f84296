"""Columns: selected names of a log as arrays in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import KINDS, Block, Column


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of n records."""

    kinds: NDArray[np.uint8]
    """Indices into :data:`dalsegno.analysis.blocks.KINDS`, shape (n,)."""
    columns: dict[str, Column]
    steps: NDArray[np.int64]
    """Shape (n,)."""
    names: list[str]
    """All numeric names of the log, in the order of their first appearance, those not in ``columns`` included."""

    def count_kinds(self) -> dict[str, int]:
        """Number of records of each kind; kinds without records are left out."""
        counts = np.bincount(self.kinds, minlength=len(KINDS) + 1).tolist()
        return {kind: count for kind, count in zip([*KINDS, "other"], counts, strict=True) if count}

    def of_kind(self, name: str, kind: str | None) -> Column:
        """The numbers under one name in the records of a kind (None: all records)."""
        column = self.columns[name]
        if kind is None:
            return column
        here = self.kinds == KINDS.index(kind)
        if column.present is None:
            return Column(here, column.values[here])
        return Column(here & column.present, column.values[here[column.present]])


def read_columns(blocks: Iterable[Block], wanted: Collection[str], also: Callable[[str], bool]) -> Columns:
    """Read a log once and keep the columns in ``wanted`` and those for which ``also`` is true; of the others, memory
    holds one block at a time."""
    kinds: list[NDArray[np.uint8]] = []
    names: dict[str, None] = {}
    pieces: dict[str, list[tuple[int, Column]]] = {}
    total = 0
    for block in blocks:
        here = block.numeric()
        names.update(dict.fromkeys(here))
        for name in [name for name in here if name in wanted or also(name)]:
            pieces.setdefault(name, []).append((total, block.column(name)))
        kinds.append(block.kinds())
        total += len(block)
    columns = {name: _joined(pieces.pop(name), total) for name in list(pieces)}
    for name in wanted:
        columns.setdefault(name, Column(np.zeros(total, np.bool_), np.array([])))
    steps = columns["global_step"].values.astype(np.int64) if total else np.array([], np.int64)
    steps.setflags(write=False)
    return Columns(np.concatenate([np.array([], np.uint8), *kinds]), columns, steps, list(names))


def _joined(pieces: list[tuple[int, Column]], total: int) -> Column:
    """One column of ``total`` records from pieces, each with the index of its first record."""
    values = np.concatenate([piece.values for _, piece in pieces])
    values.setflags(write=False)  # series share the cached array
    if len(values) == total:
        return Column(None, values)
    present = np.zeros(total, np.bool_)
    for begin, piece in pieces:
        if piece.present is None:
            present[begin : begin + len(piece.values)] = True
        else:
            present[begin : begin + len(piece.present)] = piece.present
    return Column(present, values)
