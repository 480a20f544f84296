"""FrameReader: lines of JSON as Polars frames, ten times as fast as one by one, and only if nothing is lost by it.

Polars is told the types of all names that have been seen so far. It refuses values of other types, but leaves out names
it has not been told of, which shows in the number of quotation marks: two for each name, and two for each text. And it
takes anything for a text where it expects one, which shows in what that says. Where there are more marks in the file,
which nulls do not explain, or where Polars refuses the lines (torn ones), they have to be read one by one. Of NaN and
infinite numbers it knows nothing: see ``stand_ins``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dalsegno.analysis.blocks import WHOLE
from dalsegno.logs.reader import record_in
from dalsegno.logs.values import Record

from .naming import BOOKKEEPING, HEADER, Naming, is_of_evaluation, moment
from .nonfinite import Counts, put_in, take_out

if TYPE_CHECKING:
    import polars as pl

THREADS = 3
"""Chunks that are read at the same time: Polars keeps all processors busy only in the middle of one."""

SAMPLES = 12
"""Lines of each chunk from which names and types are learnt."""

PART = 1 << 20
"""Bytes of the parts of a chunk in which Polars refuses something: only one of them is then read one by one."""

PIECE = 1 << 20
"""Bytes that are looked through at a time: they stay in the processor's cache."""

NO_TEXT = r"^(?:[-+.0-9eE]+|-?Infinity|NaN|true|false)$|^[\[{]"
"""What looks like a text to Polars and may be none: a number, a truth value, a list or a dict."""

Types = Mapping[str, type]
"""By name: bool, int, float, or str, which stands for all else."""


@dataclass(frozen=True, slots=True)
class Part:
    """Whole lines of a log."""

    lines: bytes
    frame: pl.DataFrame | None
    """Their records, under our names, without headers; None if they have to be read one by one."""


class FrameReader:
    """Reads one chunk after the other, and learns names and types as it goes."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._types: dict[str, type] = {}

    def read(self, chunks: Iterable[bytes]) -> Iterator[Part]:
        """All of the chunks, in their order. They hold whole lines each."""
        threads = ThreadPoolExecutor(THREADS, "log reader")
        ahead: deque[Future[tuple[list[Part], Types]]] = deque()
        try:
            for place, chunk in enumerate(chunks):
                if place:  # all lines of the first one are looked at anyhow
                    self.learn(_samples(chunk))
                ahead.append(threads.submit(_read_chunk, chunk, dict(self._types), self._naming))
                if place == 0 or len(ahead) > THREADS:  # what the first one teaches, the others shall know
                    yield from self._learnt(ahead.popleft())
            while ahead:
                yield from self._learnt(ahead.popleft())
        finally:
            threads.shutdown(cancel_futures=True)

    def learn(self, records: Iterable[Record]) -> None:
        """Take notice of the names and types in ``records``."""
        for record in records:
            if record.get("kind") != HEADER:
                types = {name: _type_of(value) for name, value in record.items() if value is not None}
                self._types = _joined(self._types, types)

    def _learnt(self, reading: Future[tuple[list[Part], Types]]) -> list[Part]:
        parts, types = reading.result()
        self._types = _joined(self._types, types)
        return parts


def _read_chunk(chunk: bytes, types: Types, naming: Naming) -> tuple[list[Part], Types]:
    """The chunk, as one part if possible, and what is known of the types by then."""
    frame, types = _read(chunk, types, naming)
    if frame is not None or len(chunk) <= PART:
        return [Part(chunk, frame)], types
    parts, begin = [], 0
    while begin < len(chunk):
        end = chunk.find(b"\n", begin + PART) + 1 or len(chunk)
        lines = chunk[begin:end]
        frame, types = _read(lines, types, naming)
        parts.append(Part(lines, frame))
        begin = end
    return parts, types


def _read(lines: bytes, types: Types, naming: Naming) -> tuple[pl.DataFrame | None, Types]:
    bare, stand_ins = put_in(_without_array(lines))
    frame = _complete(bare, types, stand_ins)
    if frame is None:
        bare, stand_ins = put_in(_without_headers(_without_array(lines)))
        types = _joined(types, _all_types(bare))
        frame = _complete(bare, types, stand_ins)
    return (None if frame is None else _renamed(frame, naming)), types


def _complete(lines: bytes, types: Types, stand_ins: Counts) -> pl.DataFrame | None:
    """All that is in the lines; None if there is something that Polars refuses, or leaves out."""
    import polars as pl

    kinds: dict[type, Any] = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}
    if not types:
        return None
    try:
        frame = pl.read_ndjson(lines, schema={name: kinds[kind] for name, kind in types.items()})
    except pl.exceptions.PolarsError:
        return None
    texts = [frame[name].drop_nulls() for name in frame.columns if frame.schema[name] == pl.String]
    if any(column.str.contains(NO_TEXT).any() for column in texts):
        return None
    cells = sum(len(frame) - column.null_count() for column in frame) + sum(map(len, texts))
    unexplained = count_byte(lines, b'"') - 2 * cells
    if unexplained and unexplained != 2 * _nulls(lines, frame, texts):
        return None
    return take_out(frame, stand_ins)


def _nulls(lines: bytes, frame: pl.DataFrame, texts: list[pl.Series]) -> int:
    """How many there are in the lines; 0 if some may be none, or if there are quotation marks within texts."""
    if b"\\" in lines and b'\\"' in lines:  # what is one byte long is found ten times as fast
        return 0
    if any("null" in name for name in frame.columns):
        return 0
    return 0 if any(text.str.contains("null", literal=True).any() for text in texts) else lines.count(b"null")


def _all_types(lines: bytes) -> Types:
    """Has Polars look at all lines for names, which takes three times as long as to read them."""
    import polars as pl

    types: dict[Any, type] = {pl.Int64: int, pl.Float64: float, pl.Boolean: bool}
    try:
        schema = pl.read_ndjson(lines, infer_schema_length=None).schema
    except pl.exceptions.PolarsError:
        return {}
    return {name: types.get(kind, str) for name, kind in schema.items() if kind != pl.Null}


def _renamed(frame: pl.DataFrame, naming: Naming) -> pl.DataFrame | None:
    """None if a name of ours is already another's, or a record has no step."""
    renames = naming.renames()
    if any(ours in frame.columns for ours in renames.values()):
        return None
    if renames:
        frame = frame.rename(renames, strict=False)
    frame = _with_seconds(frame)
    frame = frame.with_columns(_kind(frame).alias("kind"))
    if (frame["kind"] == HEADER).any():
        frame = frame.filter(frame["kind"] != HEADER)
    if "global_step" not in frame.columns or not _are_steps(frame["global_step"]):
        return None
    return _in_pieces_alike(frame)


def _are_steps(column: pl.Series) -> bool:
    """Whether steps can be counted by all of them: see :mod:`dalsegno.analysis.formats.naming`."""
    if column.null_count() or not column.dtype.is_numeric():
        return False
    return column.dtype.is_integer() or bool((column.is_finite() & (column.abs() < float(WHOLE))).all())


def _in_pieces_alike(frame: pl.DataFrame) -> pl.DataFrame:
    """Polars copies a frame whose columns are not in the same pieces when it is worked with, be it as long as a log."""
    return frame.rechunk() if len(set(frame.n_chunks("all"))) > 1 else frame


def _with_seconds(frame: pl.DataFrame) -> pl.DataFrame:
    """Times that are texts as UTC seconds."""
    import polars as pl

    if frame.schema.get("timestamp") != pl.String:
        return frame
    seconds = pl.Series("timestamp", [moment(text) for text in frame["timestamp"].to_list()], pl.Float64)
    return frame.with_columns(seconds) if seconds.null_count() < len(seconds) else frame


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


def _without_headers(lines: bytes) -> bytes:
    """Their names are nowhere else: a column for each would be empty in all of the log."""
    kept, begin, place = [], 0, 0
    while (place := lines.find(b'"header"', place)) >= 0:
        first, place = lines.rfind(b"\n", 0, place) + 1, lines.find(b"\n", place) + 1 or len(lines)
        if _is_header(lines[first:place]):
            kept.append(lines[begin:first])
            begin = place
    return b"".join([*kept, lines[begin:]])


def _is_header(line: bytes) -> bool:
    record = _record(line)
    return record is not None and record.get("kind") == HEADER


def _samples(lines: bytes) -> list[Record]:
    """Records from all over the chunk, the last one too."""
    begins = {lines.rfind(b"\n", 0, place) + 1 for place in range(0, len(lines), max(1, len(lines) // SAMPLES))}
    begins.add(lines.rfind(b"\n", 0, max(0, len(lines) - 1)) + 1)
    ends = ((begin, lines.find(b"\n", begin)) for begin in sorted(begins))
    records = (_record(lines[begin : end if end >= 0 else None]) for begin, end in ends)
    return [record for record in records if record is not None]


def _record(line: bytes) -> Record | None:
    try:
        return record_in(line)
    except ValueError:
        return None


def _type_of(value: Any) -> type:
    if isinstance(value, int) and not isinstance(value, bool):
        return int if abs(value) < 1 << 63 else float
    return type(value) if isinstance(value, (bool, float)) else str


def _joined(some: Types, others: Types) -> dict[str, type]:
    return {**some, **{name: _both(some.get(name, kind), kind) for name, kind in others.items()}}


def _both(one: type, other: type) -> type:
    """The type under which both can be read, or which refuses the other: numbers are never read as anything else."""
    if one == other:
        return one
    return float if {one, other} & {int, float} else str
