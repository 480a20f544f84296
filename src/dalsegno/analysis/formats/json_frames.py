"""read_frames: JSON lines as Polars frames, ten times as fast as record by record, and only if nothing is lost.

Polars gets a schema of all names seen so far. It rejects values of other types, but silently drops names missing from
the schema; the number of quotation marks reveals them: two per name and two per string. It also accepts any value as a
string; the contents reveal that. Lines with unexplained quotation marks (nulls aside), or that Polars rejects (torn
ones), are read one by one instead.

Polars cannot read NaN and infinite numbers, which JSON lacks. Placeholder numbers replace them while Polars reads, and
are then replaced in the numeric columns. If their number differs from those inserted, one is a value of the log itself,
or within a string or list; such lines are read one by one, too.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import polars as pl

from dalsegno.analysis.blocks import wider
from dalsegno.logs.reader import without_array

from .source import BOUNDS, EXACT, HEADER, OF_ALL_KINDS, Naming, is_of_evaluation, moment, without_headers

PART = 1 << 20  # bytes of the parts of a rejected chunk: only the lines of rejected parts are read one by one
PIECE = 1 << 20  # bytes counted at a time, so that they stay in the processor's cache

NO_TEXT = r"^(?:[-+.0-9eE]+|-?Infinity|NaN|true|false)$|^[\[{]"
"""Strings in a Polars column that may have been another JSON value: a number, boolean, list or dict."""

THREADS = 3  # chunks read in parallel: Polars uses all processors only in the middle of a chunk
SMALL = 2 << 20  # bytes of the chunks that are read one at a time: the first ones, in which most names appear

Types = Mapping[str, pl.DataType]
"""Name → Boolean, Int64, Float64, or String for everything else."""

Part = tuple[bytes, pl.DataFrame | None]
"""Complete lines of a log, and their records under dalsegno's names, without headers; None if they must be read one by
one."""

Counts = Mapping[bytes, int]
"""Number of placeholders for each word."""


def read_frames(chunks: Iterable[bytes], naming: Naming) -> Iterator[Part]:
    """Read chunks of complete lines. Yields them, or parts of them, in order."""
    types: Types = {}  # each chunk may add to them
    threads = ThreadPoolExecutor(THREADS, "log reader")
    ahead: deque[Future[tuple[list[Part], Types]]] = deque()
    try:
        for chunk in chunks:
            ahead.append(threads.submit(_parts, chunk, types, naming))
            while len(ahead) > (THREADS if len(chunk) > SMALL else 0):
                parts, found = ahead.popleft().result()
                types = _joined(types, found)
                yield from parts
        for reading in ahead:
            yield from reading.result()[0]
    finally:
        threads.shutdown(cancel_futures=True)


def _parts(chunk: bytes, types: Types, naming: Naming) -> tuple[list[Part], Types]:
    """The chunk, as one part if possible, and the types known afterwards."""
    frame, types = _read(chunk, types, naming)
    if frame is not None or len(chunk) <= PART:
        return [(chunk, frame)], types
    parts: list[Part] = []
    begin = 0
    while begin < len(chunk):
        lines = chunk[begin : chunk.find(b"\n", begin + PART) + 1 or len(chunk)]
        frame, types = _read(lines, types, naming)
        parts.append((lines, frame))
        begin += len(lines)
    return parts, types


def _read(lines: bytes, types: Types, naming: Naming) -> tuple[pl.DataFrame | None, Types]:
    bare, placeholders = insert_placeholders(without_array(lines))
    frame = _complete(bare, types, placeholders)
    if frame is None:
        bare, placeholders = insert_placeholders(without_headers(without_array(lines))[0])
        types = _joined(types, _all_types(bare))
        frame = _complete(bare, types, placeholders)
    return (None if frame is None else _renamed(frame, naming)), types


def _complete(lines: bytes, types: Types, placeholders: Counts) -> pl.DataFrame | None:
    """The frame of the lines; None if Polars rejects or drops something."""
    if not types:
        return None
    try:
        frame = pl.read_ndjson(lines, schema=types)
    except pl.exceptions.PolarsError:
        return None
    texts = [frame[name].drop_nulls() for name in frame.columns if frame.schema[name] == pl.String]
    if any(column.str.contains(NO_TEXT).any() for column in texts):
        return None
    cells = sum(len(frame) - column.null_count() for column in frame) + sum(map(len, texts))
    unexplained = count_byte(lines, b'"') - 2 * cells
    if unexplained and unexplained != 2 * _nulls(lines, frame, texts):
        return None
    return restore_values(frame, lines, placeholders)


def _nulls(lines: bytes, frame: pl.DataFrame, texts: list[pl.Series]) -> int:
    """Number of nulls in the lines; 0 if it is uncertain, as with escaped quotation marks."""
    is_uncertain = (
        (b"\\" in lines and b'\\"' in lines)  # a single byte is found ten times as fast
        or any("null" in name for name in frame.columns)
        or any(text.str.contains("null", literal=True).any() for text in texts)
    )
    return 0 if is_uncertain else lines.count(b"null")


def _all_types(lines: bytes) -> Types:
    """Let Polars infer names and types from all lines, which takes three times as long as reading them."""
    try:
        schema = pl.read_ndjson(lines, infer_schema_length=None).schema
    except pl.exceptions.PolarsError:
        return {}
    known = (pl.Boolean, pl.Int64, pl.Float64)
    return {name: kind if kind in known else pl.String() for name, kind in schema.items() if kind != pl.Null}


def _renamed(frame: pl.DataFrame, naming: Naming) -> pl.DataFrame | None:
    """The frame as :func:`~dalsegno.analysis.formats.source.named` would change its records; None if a name of
    dalsegno's is taken, or a step, time or epoch would be left out."""
    renames = naming.renames()
    if any(ours in frame.columns for ours in renames.values()):
        return None
    frame = frame.rename(renames, strict=False)
    if frame.schema.get("timestamp") == pl.String:
        seconds = pl.Series("timestamp", [moment(text) for text in frame["timestamp"].to_list()], pl.Float64)
        frame = frame.with_columns(seconds) if seconds.null_count() < len(seconds) else frame
    frame = frame.with_columns(_kind(frame).alias("kind"))
    if (frame["kind"] == HEADER).any():
        frame = frame.filter(frame["kind"] != HEADER)
    bounds = {"global_step": (-EXACT, EXACT), **BOUNDS}
    bounded = [name for name in bounds if (kind := frame.schema.get(name)) is not None and kind.is_numeric()]
    is_sound = all(frame[name].drop_nulls().is_between(*bounds[name], closed="none").all() for name in bounded)
    if not is_sound or "global_step" not in bounded or frame["global_step"].null_count():
        return None
    # Polars would copy a frame whose columns are chunked differently on each operation.
    return frame.rechunk() if len(set(frame.n_chunks("all"))) > 1 else frame


def _kind(frame: pl.DataFrame) -> pl.Expr:
    """:func:`dalsegno.analysis.formats.source.kind_of` for a whole frame."""
    metrics = [name for name in frame.columns if name not in OF_ALL_KINDS]
    of_training = [name for name in metrics if not is_of_evaluation(name)]
    of_evaluation = [name for name in metrics if is_of_evaluation(name)]
    given = pl.col("kind") if frame.schema.get("kind") == pl.String else pl.lit(None, pl.String)
    kind = pl.when(_any(of_evaluation) & ~_any(of_training)).then(pl.lit("eval")).otherwise(pl.lit("train"))
    if "train_runtime" in frame.columns:
        ends = _any(["train_runtime"]) & ~_any([name for name in metrics if name == "loss"])
        kind = pl.when(ends).then(pl.lit("final")).otherwise(kind)
    return pl.coalesce(given, kind)


def _any(names: list[str]) -> pl.Expr:
    return pl.any_horizontal(pl.col(name).is_not_null() for name in names) if names else pl.lit(False)


def count_byte(data: bytes, byte: bytes) -> int:
    """``data.count(byte)``, but fast for a frequent byte."""
    view = memoryview(data)
    pieces = (np.frombuffer(view[begin : begin + PIECE], np.uint8) for begin in range(0, len(data), PIECE))
    return sum(int(np.count_nonzero(piece == ord(byte))) for piece in pieces)


def _joined(some: Types, others: Types) -> Types:
    """All names in the order of their first values; those that have been texts or booleans, of their first numbers."""
    both = {name: wider(some.get(name, kind), kind) for name, kind in others.items()}
    kept = {name: kind for name, kind in some.items() if both.get(name, kind) == kind or kind.is_numeric()}
    return {**kept, **both}


_PLACEHOLDERS = {
    b"-Infinity": (-math.inf, -(2.0**-1001)),
    b"Infinity": (math.inf, -(2.0**-1002)),
    b"NaN": (math.nan, -(2.0**-1003)),
}
"""Word → (value, placeholder). Placeholders are powers of two, which every reader parses exactly."""

_SPELLED = (b': "%s"', b": %s", b':"%s"', b":%s")
"""A value behind its name, bare as Python's json writes it or quoted as dalsegno does."""
_END_OF_NAME = rb'[^"]*"[ \t]*:'
"""Follows a placeholder in a name. What follows a value is a line's end, or the beginning of a name."""


def insert_placeholders(lines: bytes) -> tuple[bytes, Counts]:
    """Replace non-finite values, in one pass for each way to spell them that occurs."""
    counts: dict[bytes, int] = {}
    for word, (_, number) in _PLACEHOLDERS.items():
        first, place = word.lstrip(b"-")[:1], 0  # a single byte is found ten times as fast
        while lines.find(first, place) >= 0 and (place := lines.find(word, place)) >= 0:
            ways = ((way % word, place - way.index(b"%")) for way in _SPELLED)
            spelled = next((text for text, begin in ways if lines.startswith(text, begin)), None)
            if spelled is None:
                place += len(word)
                continue
            before, placeholder = len(lines), spelled.replace(b'"', b"").replace(word, repr(number).encode())
            lines = lines.replace(spelled, placeholder)
            counts[word] = counts.get(word, 0) + (len(lines) - before) // (len(placeholder) - len(spelled))
    return lines, counts


def restore_values(frame: pl.DataFrame, lines: bytes, counts: Counts) -> pl.DataFrame | None:
    """The frame of ``lines``, which contain the placeholders, with the original values; None if they are ambiguous."""
    numbers = [name for name, kind in frame.schema.items() if kind == pl.Float64]
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    for word, count in counts.items():
        meant, number = _PLACEHOLDERS[word]
        in_names = re.search(re.escape(repr(number)).encode() + _END_OF_NAME, lines)
        in_texts = any(frame[name].str.contains(repr(number), literal=True).any() for name in texts)
        if in_names or in_texts or sum(int((frame[name] == number).sum()) for name in numbers) != count:
            return None
        there = (pl.when(pl.col(name) == number).then(meant).otherwise(pl.col(name)).alias(name) for name in numbers)
        frame = frame.with_columns(there)
    return frame
