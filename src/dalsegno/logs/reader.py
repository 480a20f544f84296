"""Log reader: reads records and skips a line torn by a kill."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import NotFound

from .formats import strip_line
from .values import Record, decode

logger = logging.getLogger("dalsegno")


@dataclass(slots=True)
class ReadReport:
    """What a read skipped."""

    records: int = 0
    skipped: list[str] = field(default_factory=list)
    """A message for each line without a record, with its number from 1."""


def read_records(path: Path, report: ReadReport | None = None) -> Iterator[Record]:
    """Iterate over the records of a log that :class:`RecordLog` wrote, or of an archived tail.

    A line without a record (torn by a kill, damaged) is skipped and added to ``report``; without a report it is logged
    as a warning. Holds one record in memory.

    Raises:
        NotFound: if the file does not exist.
    """
    report = ReadReport() if (warn := report is None) else report
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such log") from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                record = record_in(line)
            except ValueError as error:
                report.skipped.append(f"line {number}: {error}")
                if warn:
                    logger.warning("%s: skipped %s", path, report.skipped[-1])
                continue
            if record is not None:
                report.records += 1
                yield record


def record_in(line: bytes) -> Record | None:
    """Return the record in a line; None for a blank line or an array's bracket.

    Raises:
        ValueError: for any other content, such as a part of a record.
    """
    if not (text := strip_line(line)):
        return None
    record = decode(text)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    return record
