"""Source: a log file of any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar, NoReturn

from dalsegno.analysis.blocks import Block, RecordBlock
from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record

from .naming import HEADER, Naming

SENTENCES = 10
"""Most skipped lines or records that are described."""

BATCH = 4096
"""Records held as objects at a time."""


@dataclass(slots=True)
class Skipped:
    """Lines or records that a read skipped."""

    count: int = 0
    sentences: list[str] = field(default_factory=list)
    """Descriptions of the first ten."""

    def note(self, sentence: str, count: int = 1) -> None:
        self.count += count
        if len(self.sentences) < SENTENCES:
            self.sentences.append(sentence)

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        rest = self.count - len(self.sentences)
        return "; ".join([*self.sentences, *([f"and {rest:,} more"] if rest > 0 else [])])


def named(
    records: Iterable[tuple[int, Record]], naming: Naming, skipped: Skipped, what: str = "line"
) -> Iterator[Record]:
    """The records, each given with its number, under dalsegno's names; those without a step are noted."""
    for number, record in records:
        renamed = naming.apply(record)
        if renamed is None:
            skipped.note(f"{what} {number}: no number under {naming.step!r}")
        else:
            yield renamed


class Source(ABC):
    """One log. Its records use dalsegno's names: ``timestamp`` (UTC seconds), ``kind`` (in every record),
    ``global_step``, ``epoch``."""

    program: ClassVar[str]
    """Program that writes the format."""

    def __init__(self, path: Path, step_key: str | None = None) -> None:
        self.path = path
        self.step_key = step_key
        """Key of the step in its records; None: one of the usual names."""

    @abstractmethod
    def records(self, skipped: Skipped) -> Iterator[Record]:
        """Yield the records in the order of the file; what is not a record is noted in ``skipped``."""

    def blocks(self, skipped: Skipped) -> Iterator[Block]:
        """Yield the records as columns, a part of the log at a time, without the header."""
        records = (record for record in self.records(skipped) if record["kind"] != HEADER)
        while batch := list(islice(records, BATCH)):
            yield RecordBlock(batch)

    def files(self) -> list[Path]:
        """The log's files."""
        return [self.path]

    def changed(self) -> float:
        """UTC seconds of the last change to the log's files."""
        return max(path.stat().st_mtime for path in self.files() or [self.path])

    def stamp(self) -> tuple[int, ...]:
        """A value that changes when the log does."""
        status = [path.stat() for path in self.files()]
        return tuple(number for each in status for number in (each.st_ino, each.st_size, each.st_mtime_ns))


class Unreadable(Source):
    """A file or directory that may be a log and cannot be opened.

    Raises:
        ConfigurationError: from each method.
    """

    program = "unreadable"

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path)
        self._error = error

    def _fail(self, *_: object, **__: object) -> NoReturn:
        error = self._error
        raise ConfigurationError(f"{error.filename or self.path}: cannot be read: {error.strerror or error}")

    records = files = _fail
