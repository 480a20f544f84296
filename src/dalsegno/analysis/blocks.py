"""Block: part of a log in columns, backed by records or, for long logs, by a Polars frame. Columns join the blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dalsegno.logs.values import Record, is_number

if TYPE_CHECKING:
    import polars as pl


KINDS = ("train", "eval", "final", "user", "sync", "save")
"""Kinds of records, the header aside. Columns store the index; any other kind has index ``len(KINDS)``."""

_PLACES = {kind: place for place, kind in enumerate(KINDS)}
_NUMBERS = {int, float, type(None)}

WHOLE = 1 << 63  # integers of this magnitude do not fit int64


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers under one name in n records, of which m have one."""

    present: NDArray[np.bool_] | None
    """Records that have a number, shape (n,); None: all."""
    values: NDArray[np.float64]
    """Their numbers, shape (m,)."""

    def at(self, here: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """The values of the selected records (None: all), NaN for missing ones."""
        if self.present is None:
            values = self.values
        else:
            values = np.full(len(self.present), np.nan)
            values[self.present] = self.values
        return values if here is None else values[here]


class RecordBlock:
    """n records with a step; never the header. ``columns``: those that are known already."""

    def __init__(self, records: Sequence[Record], columns: Mapping[str, Column] | None = None) -> None:
        self._records = records
        self._columns = columns or {}

    def __len__(self) -> int:
        return len(self._records)

    def kinds(self) -> NDArray[np.uint8]:
        """Indices into :data:`KINDS`, shape (n,)."""
        return np.array([_PLACES.get(record["kind"], len(KINDS)) for record in self._records], np.uint8)

    def numeric(self) -> list[str]:
        """Names that have numbers, in the order of the log."""
        found: dict[str, None] = {}
        others: dict[tuple[str, ...], list[str]] = {}  # by the names of a record, those without a number so far
        for record in self._records:
            if (looked_at := others.get(names := tuple(record))) is None:
                looked_at = others[names] = [name for name in names if name != "kind"]
            if looked_at and (numbers := [name for name in looked_at if is_number(record[name])]):
                found.update(dict.fromkeys(numbers))
                others[names] = [name for name in looked_at if name not in found]
        return list(found)

    def column(self, name: str) -> Column:
        """The numbers under a name of :meth:`numeric`; strings, lists and booleans are skipped."""
        if name in self._columns:
            return self._columns[name]
        found = [record.get(name) for record in self._records]
        kinds = {*map(type, found)}
        if not kinds <= _NUMBERS:
            found = [value if is_number(value) else None for value in found]
        elif type(None) not in kinds:
            return Column(None, np.array(found, np.float64))
        known = [value for value in found if value is not None]
        present = None if len(known) == len(found) else np.array([value is not None for value in found])
        return Column(present, np.array(known, np.float64))

    def frame(self) -> pl.DataFrame:
        """One row per record. A column with any numbers keeps only numbers; lists and dicts become JSON text."""
        import polars as pl

        numeric = set(self.numeric())
        names = list({name: None for record in self._records for name in record})
        columns = {name: [record.get(name) for record in self._records] for name in names}
        return pl.DataFrame([_column(name, columns[name], name in numeric) for name in names])


class FrameBlock:
    """As a :class:`RecordBlock`, of a frame whose column ``kind`` has no nulls."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def kinds(self) -> NDArray[np.uint8]:
        import polars as pl

        return self._frame["kind"].replace_strict(_PLACES, default=len(KINDS), return_dtype=pl.UInt8).to_numpy()

    def numeric(self) -> list[str]:
        numbers = (name for name, kind in self._frame.schema.items() if kind.is_numeric())
        known = {name: self._frame[name].is_not_null() for name in numbers}
        return sorted((name for name, here in known.items() if here.any()), key=lambda name: known[name].arg_max() or 0)

    def column(self, name: str) -> Column:
        import polars as pl

        column = self._frame[name]
        present = column.is_not_null().to_numpy() if column.null_count() else None
        return Column(present, column.drop_nulls().cast(pl.Float64).to_numpy())

    def frame(self) -> pl.DataFrame:
        return self._frame


Block = RecordBlock | FrameBlock


def concatenate(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Stack frames vertically. A column that is numeric in one frame is numeric in all; other values become null."""
    import polars as pl

    kinds: dict[str, pl.DataType] = {}
    for frame in frames:
        for name, kind in frame.schema.items():
            kinds[name] = wider(kinds.get(name, kind), kind)
    fitting = []
    for frame in frames:
        changes = [
            pl.col(name).cast(kinds[name])
            if kind.is_numeric() or not kinds[name].is_numeric()  # else the cast would not keep the values
            else pl.lit(None, kinds[name]).alias(name)
            for name, kind in frame.schema.items()
            if kind != kinds[name]
        ]
        fitting.append(frame.with_columns(changes) if changes else frame)
    return pl.concat(fitting, how="diagonal") if fitting else pl.DataFrame()


def wider(one: pl.DataType, other: pl.DataType) -> pl.DataType:
    """The type that reads both, or, of a number and something else, that of the number."""
    import polars as pl

    if one == other or (one.is_numeric() and not other.is_numeric()):
        return one
    if other.is_numeric() and not one.is_numeric():
        return other
    return pl.Float64() if one.is_numeric() else pl.String()


def _column(name: str, values: list[Any], numeric: bool) -> pl.Series:
    import polars as pl

    if numeric:
        numbers = [value if is_number(value) else None for value in values]
        whole = all(isinstance(value, int) and abs(value) < WHOLE for value in numbers if value is not None)
        if whole:
            return pl.Series(name, numbers, pl.Int64)
        return pl.Series(name, [None if value is None else float(value) for value in numbers], pl.Float64)
    if all(value is None or isinstance(value, bool) for value in values):
        return pl.Series(name, values, pl.Boolean)
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pl.Series(name, texts, pl.String)


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
    columns = {name: _join(pieces.pop(name), total) for name in list(pieces)}
    for name in wanted:
        columns.setdefault(name, Column(np.zeros(total, np.bool_), np.array([])))
    steps = columns["global_step"].values.astype(np.int64) if total else np.array([], np.int64)
    steps.setflags(write=False)
    return Columns(np.concatenate([np.array([], np.uint8), *kinds]), columns, steps, list(names))


def _join(pieces: list[tuple[int, Column]], total: int) -> Column:
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
