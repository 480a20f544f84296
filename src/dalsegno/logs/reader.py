"""Read a log back, whatever a kill has left of its last line."""

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
    """What a reading left out."""

    records: int = 0
    skipped: list[str] = field(default_factory=list)
    """One sentence for each line that holds no record, with its number from 1."""


def read_records(path: Path, report: ReadReport | None = None) -> Iterator[Record]:
    """The records of a log that :class:`RecordLog` has written, or of an archived tail, one after the other.

    A line that holds no record (torn by a kill, damaged) is skipped and noted in ``report``; without a report
    it is warned about. Memory is that of one record.

    Raises:
        NotFound: if there is no such file.
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
    """The record in a line; None in one that rightly holds none: it is blank, or an array's bracket.

    Raises:
        ValueError: if there is something else: a part of a record, or of no log at all.
    """
    if not (text := strip_line(line)):
        return None
    record = decode(text)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    return record
