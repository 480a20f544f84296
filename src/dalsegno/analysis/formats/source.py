"""Source: a log file, whatever program wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar, NoReturn

from dalsegno.analysis.blocks import Block, RecordBlock
from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record

from .naming import HEADER

SENTENCES = 10
"""How many of the things left out are told one by one."""

BATCH = 4096
"""Records that are held as objects at the same time."""


@dataclass(slots=True)
class Skipped:
    """What a reading left out."""

    count: int = 0
    sentences: list[str] = field(default_factory=list)
    """The first ten, a sentence each."""

    def note(self, sentence: str, count: int = 1) -> None:
        self.count += count
        if len(self.sentences) < SENTENCES:
            self.sentences.append(sentence)

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        rest = self.count - len(self.sentences)
        return "; ".join([*self.sentences, *([f"and {rest:,} more"] if rest > 0 else [])])


class Source(ABC):
    """One log. Its records have the names that dalsegno's own have: ``timestamp`` (UTC seconds), ``kind``,
    ``global_step``, ``epoch``; and each has a ``kind``, also those of training."""

    program: ClassVar[str]
    """Whose format it is."""

    def __init__(self, path: Path, step_key: str | None = None) -> None:
        self.path = path
        self.step_key = step_key
        """The name of the step in its records; None where it is one of the usual ones."""

    @abstractmethod
    def records(self, skipped: Skipped) -> Iterator[Record]:
        """One record after the other, in the file's order; what cannot be one is noted in ``skipped``."""

    def blocks(self, skipped: Skipped) -> Iterator[Block]:
        """The same in columns, a part of the log at a time, and without the header."""
        records = (record for record in self.records(skipped) if record["kind"] != HEADER)
        while batch := list(islice(records, BATCH)):
            yield RecordBlock(batch)

    def changed(self) -> float:
        """UTC seconds of the last change to the log's files."""
        return self.path.stat().st_mtime

    def stamp(self) -> tuple[int, ...]:
        """Changes when the log does."""
        status = self.path.stat()
        return (status.st_ino, status.st_size, status.st_mtime_ns)


class Unreadable(Source):
    """A file or folder that may hold a log, and that the system does not let us open.

    Raises:
        ConfigurationError: whatever is asked of it.
    """

    program = "unreadable"

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path)
        self._error = error

    def records(self, skipped: Skipped) -> Iterator[Record]:
        self._tell()

    def changed(self) -> float:
        self._tell()

    def stamp(self) -> tuple[int, ...]:
        self._tell()

    def _tell(self) -> NoReturn:
        error = self._error
        raise ConfigurationError(f"{error.filename or self.path}: cannot be read: {error.strerror or error}")
