"""Follower: the last records of a log, then new ones as they are written, also across a rewind of the log."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import xxhash

from dalsegno.logs.reader import strip_line
from dalsegno.logs.values import Record
from dalsegno.system.machine import pread

from .formats.find import source_of_run
from .formats.json_lines import JsonLines, decode_lines
from .formats.source import HEADER, Skipped, Source, named

BACKWARDS = 1 << 16  # bytes per read, from the end of a file towards its beginning
REMEMBERED = 4096  # records whose position in the file is kept: the furthest rewind that can be followed


@dataclass(frozen=True, slots=True)
class Cut:
    """The log was rewound or replaced; the following records come after this step."""

    step: int | None
    """None if no record read so far is left."""


class Follower:
    """Polls one log.

    JSON lines are read from their end, in time independent of the log's length; other formats are read in full
    whenever they change.
    """

    def __init__(self, source: Source, folder: Path | None = None) -> None:
        """
        Args:
            folder: the run directory, whose log may continue in another file, such as ``train-2.jsonl`` or the newest
                checkpoint's ``trainer_state.json``; None: only this file.
        """
        self._folder = folder
        self._reader = _reader(source)

    def last(self, count: int) -> list[Record]:
        """The last ``count`` records."""
        return self._reader.last(count)

    def new(self) -> list[Record | Cut]:
        """Records and cuts since the last call, or since :meth:`last`. Does not block; empty if the file is gone."""
        return self._reader.new() or self._elsewhere()

    def _elsewhere(self) -> list[Record | Cut]:
        """Records of the file in which the log now continues; empty if that is still the same file."""
        here = self._reader.source
        try:
            source = source_of_run(self._folder, here.step_key) if self._folder else None
        except OSError:
            return []
        if source is None or source.path == here.path:
            return []
        if type(source) is type(here):
            self._reader.source = source
            return self._reader.new()
        self._reader = _reader(source)
        return [Cut(None), *self._reader.new()]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A record that was read: its byte range and digest."""

    begin: int
    end: int
    digest: int
    step: int | None


def _reader(source: Source) -> _Lines | _Whole:
    return _Lines(source) if isinstance(source, JsonLines) else _Whole(source)


class _Lines:
    def __init__(self, source: JsonLines) -> None:
        self.source = source
        self._seen: deque[_Seen] = deque(maxlen=REMEMBERED)
        self._end = 0

    def last(self, count: int) -> list[Record]:
        self._seen.clear()
        with self.source.path.open("rb") as file:
            self._end = _begin_of_last_lines(file.fileno(), count)
            found = list(self._read(file.fileno()))
        records = [record for record in found if record["kind"] != HEADER]
        return records[max(0, len(records) - count) :]

    def new(self) -> list[Record | Cut]:
        try:
            file = self.source.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            cut = self._step_back(file.fileno())
            return [*cut, *(record for record in self._read(file.fileno()) if record["kind"] != HEADER)]

    def _read(self, descriptor: int) -> Iterator[Record]:
        """The complete records after the last one read. A line without its end is complete if it is JSON."""
        place = self._end
        data = pread(descriptor, max(0, os.fstat(descriptor).st_size - place), place)
        naming = self.source.naming() if data.strip() else None
        for line in data.splitlines(keepends=True):
            begin, place = place, place + len(line)
            text = strip_line(line)
            if naming is None or not text:
                continue
            begin += line.index(text)
            for record in named(decode_lines([text], 1, Skipped()), naming, Skipped()):
                self._end = begin + len(text)
                self._seen.append(_Seen(begin, self._end, xxhash.xxh3_64_intdigest(text), record.get("global_step")))
                yield record

    def _step_back(self, descriptor: int) -> list[Cut]:
        """Return to the last record that is still in the file."""
        before = self._end
        while self._seen:
            last = self._seen[-1]
            text = pread(descriptor, last.end - last.begin, last.begin)
            if xxhash.xxh3_64_intdigest(text) == last.digest:
                self._end = last.end
                return [Cut(last.step)] if self._end < before else []
            self._seen.pop()
        self._end = 0 if before else self._end
        return [Cut(None)] if before else []


class _Whole:
    def __init__(self, source: Source) -> None:
        self.source = source
        self._stamp: tuple[int, ...] = ()
        self._records: list[Record] = []

    def last(self, count: int) -> list[Record]:
        self.new()
        return self._records[max(0, len(self._records) - count) :]

    def new(self) -> list[Record | Cut]:
        try:
            if (stamp := self.source.stamp()) == self._stamp:
                return []
            records = [record for record in self.source.records(Skipped()) if record["kind"] != HEADER]
        except FileNotFoundError:
            return []
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._records, records, strict=False)))
        cut = [Cut(records[same - 1]["global_step"] if same else None)] if same < len(self._records) else []
        self._stamp, self._records = stamp, records
        return [*cut, *records[same:]]


def _begin_of_last_lines(descriptor: int, count: int) -> int:
    """Offset of the last ``count`` lines and three more, for brackets and a line torn by a kill."""
    begin, lines = os.fstat(descriptor).st_size, 0
    while begin > 0 and lines <= count + 3:
        piece = min(BACKWARDS, begin)
        begin -= piece
        lines += pread(descriptor, piece, begin).count(b"\n")
    if begin == 0:
        return 0
    return begin + pread(descriptor, BACKWARDS, begin).index(b"\n") + 1
