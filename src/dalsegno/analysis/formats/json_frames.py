"""FrameReader: lines of JSON as a Polars frame, ten times as fast as one by one, and only if nothing is lost by it.

Polars is told the types of all names that have been seen so far. It refuses values of other types, but leaves out names
it has not been told of, and takes numbers for texts where it expects these. Both show in the number of quotation marks:
two for each name, and two for each text. Where that number is not the file's, or Polars refuses the lines (torn ones,
NaN), they have to be read one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dalsegno.logs.formats import strip_line
from dalsegno.logs.values import Record, decode

from .naming import BOOKKEEPING, HEADER, Naming, is_of_evaluation

if TYPE_CHECKING:
    import polars as pl

SAMPLES = 24
"""Lines of each chunk from which names and types are learnt."""

PIECE = 1 << 20
"""Bytes that are looked through at a time: they stay in the processor's cache."""


class FrameReader:
    """Reads one chunk after the other, and learns names and types as it goes."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._types: dict[str, type] = {}

    def read(self, chunk: bytes) -> pl.DataFrame | None:
        """The records of whole lines, under our names; None if they have to be read one by one."""
        import polars as pl

        lines = _without_array(chunk)
        self.learn(_samples(lines))
        try:
            frame = self._read(lines)
            if frame is None:
                self._learn_all(lines)
                frame = self._read(lines)
        except pl.exceptions.PolarsError:
            return None
        return None if frame is None else self._renamed(frame)

    def learn(self, records: Iterable[Record]) -> None:
        """Take notice of the names and types in ``records``."""
        for record in records:
            for name, value in record.items():
                if value is not None:
                    self._learn(name, _type_of(value))

    def _learn_all(self, lines: bytes) -> None:
        """Have Polars look at all lines for names: this takes three times as long as to read them."""
        import polars as pl

        types: dict[Any, type] = {pl.Int64: int, pl.Float64: float, pl.Boolean: bool}
        for name, kind in pl.read_ndjson(lines, infer_schema_length=None).schema.items():
            if kind != pl.Null:
                self._learn(name, types.get(kind, str))

    def _learn(self, name: str, kind: type) -> None:
        known = self._types.get(name, kind)
        self._types[name] = _both(known, kind)

    def _read(self, lines: bytes) -> pl.DataFrame | None:
        """None if something is missing. Raises PolarsError if there is something that Polars refuses."""
        import polars as pl

        types: dict[type, Any] = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}
        if not self._types:
            return None
        frame = pl.read_ndjson(lines, schema={name: types[kind] for name, kind in self._types.items()})
        return frame if _is_complete(frame, lines) else None

    def _renamed(self, frame: pl.DataFrame) -> pl.DataFrame | None:
        renames = self._naming.renames()
        if any(ours in frame.columns for ours in renames.values()):
            return None
        frame = frame.rename(renames, strict=False)
        frame = frame.with_columns(_kind(frame).alias("kind"))
        if (frame["kind"] == HEADER).any():
            frame = frame.filter(frame["kind"] != HEADER)
        return frame if "global_step" in frame.columns and not frame["global_step"].null_count() else None


def _kind(frame: pl.DataFrame) -> pl.Expr:
    """As :func:`dalsegno.analysis.formats.naming.kind_of`, for a whole frame."""
    import polars as pl

    names = frame.columns
    metrics = [name for name in names if name not in BOOKKEEPING]
    of_training = [name for name in metrics if not is_of_evaluation(name)]
    of_evaluation = [name for name in metrics if is_of_evaluation(name)]
    said = pl.col("kind") if frame.schema.get("kind") == pl.String else pl.lit(None, pl.String)
    if _say_their_kind(frame, of_training) and "train_runtime" not in names:
        return said.fill_null("train")
    kind = pl.when(_any(of_evaluation) & ~_any(of_training)).then(pl.lit("eval")).otherwise(pl.lit("train"))
    if "train_runtime" in names:
        kind = pl.when(pl.col("train_runtime").is_not_null()).then(pl.lit("final")).otherwise(kind)
    return pl.coalesce(said, kind)


def _say_their_kind(frame: pl.DataFrame, of_training: list[str]) -> bool:
    """Whether all records that do not say their kind have the metric of training that most have: as in our own logs."""
    most = min(of_training, key=lambda name: frame[name].null_count(), default=None)
    if most is None:
        return False
    without = frame[most].is_null()
    return not (without & frame["kind"].is_null() if "kind" in frame.columns else without).any()


def _any(names: list[str]) -> pl.Expr:
    import polars as pl

    return pl.any_horizontal(pl.col(name).is_not_null() for name in names) if names else pl.lit(False)


def _is_complete(frame: pl.DataFrame, lines: bytes) -> bool:
    import polars as pl

    cells = sum(len(frame) - frame[name].null_count() for name in frame.columns)
    texts = sum(len(frame) - frame[name].null_count() for name in frame.columns if frame.schema[name] == pl.String)
    left = count_byte(lines, b'"') - 2 * (cells + texts)
    return left == 0 or left == 2 * lines.count(b"null")


def count_byte(data: bytes, byte: bytes) -> int:
    """How often it is there: as ``data.count(byte)``, but fast where it is everywhere."""
    view = memoryview(data)
    pieces = (np.frombuffer(view[begin : begin + PIECE], np.uint8) for begin in range(0, len(data), PIECE))
    return sum(int(np.count_nonzero(piece == ord(byte))) for piece in pieces)


def _without_array(chunk: bytes) -> bytes:
    """The lines of an array as lines of their own: without brackets and commas."""
    lines = chunk
    if lines.startswith(b"["):
        lines = lines[1:]
    if lines.endswith(b"\n]\n"):
        lines = lines[:-2]
    first = lines.lstrip()[: 1 << 16].partition(b"\n")[0]
    return lines.replace(b",\n", b"\n") if first.rstrip().endswith(b",") else lines


def _samples(lines: bytes) -> list[Record]:
    """Records from all over the chunk, the last one too."""
    begins = {lines.rfind(b"\n", 0, place) + 1 for place in range(0, len(lines), max(1, len(lines) // SAMPLES))}
    begins.add(lines.rfind(b"\n", 0, max(0, len(lines) - 1)) + 1)
    found = []
    for begin in sorted(begins):
        end = lines.find(b"\n", begin)
        try:
            record = decode(strip_line(lines[begin : end if end >= 0 else None]))
        except ValueError:
            continue
        found += [record] if isinstance(record, dict) else []
    return found


def _type_of(value: Any) -> type:
    """One of bool, int, float and str, which stands for all else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int if abs(value) < 1 << 63 else float
    return type(value) if isinstance(value, (bool, float)) else str


def _both(one: type, other: type) -> type:
    """The type under which both can be read, or which refuses the other: numbers are never read as anything else."""
    if one == other:
        return one
    return float if {one, other} & {int, float} else str
