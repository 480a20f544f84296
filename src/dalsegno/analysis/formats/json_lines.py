"""JSON lines: dalsegno's own logs, Forgather's ``trainer_logs.json``, and those of many other programs.

The lines may be those of an array, whose brackets may be missing and whose last record may be torn. The file may grow
while it is read: records after the end that was reached are left for the next read.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dalsegno.analysis.blocks import Block, FrameBlock, RecordBlock
from dalsegno.errors import ConfigurationError, NotFound
from dalsegno.logs.reader import record_in, without_array
from dalsegno.logs.values import Record, from_json
from dalsegno.system.machine import pread

from .source import (
    FIRST,
    HEADER,
    NOT_FINITE,
    OURS,
    Naming,
    Skipped,
    Source,
    is_json,
    named,
    named_at_once,
    no_step,
    trace_of,
    without_headers,
)

if TYPE_CHECKING:
    import polars as pl

CHUNK = 8 << 20  # bytes per read
FIRST_CHUNK = CHUNK >> 6  # bytes of the first read: most names appear there, and a chunk with new names is read again
GROWTH = 4  # ratio of successive chunk sizes, up to ``CHUNK``
BEGINNING = 1 << 16  # bytes read to find the names of the records
LONG = 4 << 20  # least file size in bytes to use Polars, whose import takes as long as Python's json for this much
LINE_END, BRACE = b"\n{"
LONG_NUMBER = 150  # digits: an integer beyond the range of floats has twice as many


class JsonLines(Source):
    """
    Args:
        step_key: key of the step in each record, if it is an unusual one.
    """

    program = "JSON lines"
    unit = "line"

    def read(self, skipped: Skipped, kind: str | None = None) -> Iterator[tuple[int, Record]]:
        number = 1
        for chunk in read_chunks(self.path):
            lines = chunk.splitlines(keepends=True)
            yield from decode_lines(lines if kind is None else _without_others(lines, kind), number, skipped)
            number += len(lines)

    def records(self, skipped: Skipped, kind: str | None = None) -> Iterator[Record]:
        return named(self.read(skipped, kind), self.naming(), skipped, self.unit)

    def blocks(self, skipped: Skipped) -> Iterator[Block]:
        naming, chunks = self.naming(), read_chunks(self.path)
        parts: Iterable[tuple[bytes, pl.DataFrame | None]] = ((lines, None) for lines in chunks)
        if self.path.stat().st_size >= LONG and find_spec("polars") is not None:
            from .json_frames import read_frames

            parts = read_frames(chunks, naming)
        number, numbered, begin = 1, 0, 0
        for lines, frame in parts:
            if frame is not None:
                yield FrameBlock(frame)
            elif (block := read_at_once(lines, naming)) is not None:
                yield block
            else:
                number += _count_lines(self.path, numbered, begin)
                numbered = begin
                found = named(decode_lines(lines.splitlines(keepends=True), number, skipped), naming, skipped)
                yield RecordBlock([record for record in found if record["kind"] != HEADER])
            begin += len(lines)

    def naming(self) -> Naming:
        """The naming of this log, from its first record with a step."""
        chunks = read_chunks(self.path, BEGINNING)
        found = (each for chunk in chunks for each in decode_lines(chunk.splitlines(keepends=True), 1, Skipped()))
        return _naming_of(found, self)


def read_at_once(lines: bytes, naming: Naming) -> RecordBlock | None:
    """The records in complete lines without the header. They are decoded as one array, which has an object for each
    line if each line begins with the only brace that it has. None if that is not so, or if
    :func:`~dalsegno.analysis.formats.source.named` has to look at each."""
    lines, headers = without_headers(without_array(lines))
    letters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(letters == LINE_END)
    if not (
        len(ends)
        and ends[-1] == len(lines) - 1
        and np.count_nonzero(letters == BRACE) == len(ends)
        and letters[0] == BRACE
        and (letters[ends[:-1] + 1] == BRACE).all()
        and not (b"\\" in lines or b"\r" in lines)
        and not any(lines[begin : begin + LONG_NUMBER].isdigit() for begin in range(0, len(lines), LONG_NUMBER))
    ):
        return None
    try:
        joined = lines[:-1].decode().replace("\n", ",")
        records = _DECODER.decode(f"[{joined}]")
    except (ValueError, RecursionError):
        return None
    if len(records) != len(ends) or {*map(type, records)} != {dict}:
        return None
    if any(word[:1] in lines and word in lines for word in NOT_FINITE):  # a single byte is found ten times as fast
        records = from_json(records)
    of_headers = Skipped()
    deque(named(enumerate(headers), naming, of_headers), 0)
    if of_headers or (b"[" in lines and not all(map(is_json, chain.from_iterable(map(dict.values, records))))):
        return None
    return named_at_once(records, naming, has_nulls=b"null" in lines)


def _without_others(lines: Iterable[bytes], kind: str) -> list[bytes]:
    """The lines; blank where one is certainly a whole record of another kind, which saves its decoding."""
    has_trace = trace_of(kind).search
    ends = (b"}\n", b"},\n", b"}\r\n")
    return [
        line if has_trace(line) or b"\\" in line or not (line.startswith(b"{") and line.endswith(ends)) else b""
        for line in lines
    ]


def _naming_of(records: Iterable[tuple[int, Record]], source: Source) -> Naming:
    """The naming of the first record with a step. Raises ConfigurationError if none of the first has one."""
    first: Record = {}
    for _, record in islice(records, FIRST):
        if record.get("kind") != HEADER:
            if naming := Naming.of(record, source.step_key):
                return naming
            first = first or record
    if not first:
        return OURS
    raise ConfigurationError(no_step(source.path, first, source.step_key))


def read_chunks(path: Path, size: int = CHUNK) -> Iterator[bytes]:
    """Yield complete lines, about ``size`` bytes at a time, and finally a line without an end, if there is one."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such log") from error
    with file:
        begin, wanted = 0, min(size, FIRST_CHUNK)
        while data := _read_lines(file.fileno(), begin, wanted):
            yield data
            begin, wanted = begin + len(data), min(size, wanted * GROWTH)


def _read_lines(descriptor: int, begin: int, wanted: int) -> bytes:
    """Complete lines, up to ``wanted`` bytes or one line; the rest of the file if no line ends in it.

    Finds the end of the last line before reading: cutting bytes off afterwards would copy the others.
    """
    look = min(wanted, BEGINNING)
    before_end = pread(descriptor, look, begin + wanted - look)
    if len(before_end) == look and (end := before_end.rfind(b"\n") + 1):
        return pread(descriptor, wanted - look + end, begin)
    data = pread(descriptor, wanted, begin)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == wanted:
        return _read_lines(descriptor, begin, wanted * 2)
    return data[:end] if end else data


def _count_lines(path: Path, begin: int, end: int) -> int:
    """Number of line ends between two offsets; needed only for the line numbers of skipped lines."""
    with path.open("rb") as file:
        file.seek(begin)
        pieces = (file.read(min(BEGINNING, end - place)) for place in range(begin, end, BEGINNING))
        return sum(piece.count(b"\n") for piece in pieces)


def decode_lines(lines: Iterable[bytes], number: int, skipped: Skipped) -> Iterator[tuple[int, Record]]:
    """The records in lines, each with its line number. Lines that are not records are noted."""
    for place, line in enumerate(lines, start=number):
        try:
            record = record_in(line)
        except ValueError as error:
            torn = "" if line.endswith(b"\n") else "torn, "
            skipped.note(f"line {place}: {torn}{error}")
            continue
        if record is not None:
            yield place, record


# --- arrays of any layout, and Hugging Face's trainer_state.json ----------------------------------------------------

_BEGIN = re.compile(r"[^\s,]")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_DECODER = json.JSONDecoder()


class JsonArray(Source):
    """Arguments and errors as for :class:`JsonLines`."""

    program = "JSON array"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        return enumerate(decode_array(text, text.find("[") + 1, skipped), start=1)

    def naming(self) -> Naming:
        return _naming_of(self.read(Skipped()), self)


def decode_array(text: str, begin: int, skipped: Skipped) -> Iterator[Record]:
    """The records of the array whose bracket precedes ``begin``, up to its end or to the first invalid record."""
    number = 0
    while (first := _BEGIN.search(text, begin)) and first[0] != "]":
        begin, number = first.start(), number + 1
        try:
            value, begin = _DECODER.raw_decode(text, begin)
            value = from_json(value)
        except (ValueError, RecursionError) as error:
            skipped.note(f"record {number}, at character {begin + 1}: {error}; the rest is not read")
            return
        if isinstance(value, dict):
            yield value
        else:
            skipped.note(f"record {number}: a {type(value).__name__}, not an object")


class TrainerState(Source):
    """The header contains the other fields of the state: ``max_steps``, ``train_batch_size`` …"""

    program = "Hugging Face"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        text = self.path.read_text(encoding="utf-8-sig", errors="replace")
        if header := _header(text):
            yield 0, {"kind": HEADER, **header}
        history = _HISTORY.search(text)
        if history is None:
            skipped.note("no log_history")
            return
        yield from enumerate(decode_array(text, history.end(), skipped), start=1)

    def naming(self) -> Naming:
        return Naming("step", None, "epoch")


def _header(text: str) -> Record:
    """Scalar fields of the state; empty if the file is torn."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    places = ("global_step", "epoch")
    return {name: value for name, value in state.items() if isinstance(value, str | int | float) and name not in places}
