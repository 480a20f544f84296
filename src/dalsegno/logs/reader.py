"""Log reader: the layouts of a log file, and its records without a line torn by a kill."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import ConfigurationError, NotFound

from .values import Record, decode, step_of

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class Format:
    """Layout of records in a file: ``head record record … foot``; each append moves the foot."""

    head: bytes
    before_first: bytes
    before_next: bytes
    after: bytes
    foot: bytes

    def append(self, line: bytes, *, first: bool) -> bytes:
        """Return the bytes to append for ``line``, without the foot."""
        return (self.before_first if first else self.before_next) + line + self.after


JSON_LINES = Format(head=b"", before_first=b"", before_next=b"", after=b"\n", foot=b"")
JSON_ARRAY = Format(head=b"[", before_first=b"\n", before_next=b",\n", after=b"", foot=b"\n]\n")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # written at the start of text files by some Windows programs

_BY_SUFFIX = {".jsonl": JSON_LINES, ".json": JSON_ARRAY}


def format_of(path: Path) -> Format:
    """Return JSON lines for ``.jsonl``; for ``.json`` one JSON array, which is valid after every append. Raises
    ConfigurationError for any other suffix.
    """
    try:
        return _BY_SUFFIX[path.suffix]
    except KeyError:
        raise ConfigurationError(
            f"log path {str(path)!r}: the suffix must be .jsonl (one record per line) or .json (a JSON array)"
        ) from None


def numbered(stem: str) -> tuple[str, int]:
    """Split ``train-2``, the successor of ``train`` (number 1) after another program wrote to it, into name, number."""
    name, dash, number = stem.rpartition("-")
    return (name, int(number)) if dash and number.isdecimal() else (stem, 1)


def strip_line(line: bytes) -> bytes:
    """Return the record in a line of either format; empty if the line contains only a bracket."""
    record = line.strip().removeprefix(_BYTE_ORDER_MARK).removesuffix(b",")
    return b"" if record in (b"[", b"]") else record


def without_array(lines: bytes) -> bytes:
    """Return complete lines of a JSON array as JSON lines, without brackets and commas."""
    lines = lines.removeprefix(b"[\n")
    if lines.endswith(b"\n]\n"):
        lines = lines[:-2]
    first = lines.lstrip()[: 1 << 16].partition(b"\n")[0]
    return lines.replace(b",\n", b"\n") if first.rstrip().endswith(b",") else lines


@dataclass(slots=True)
class ReadReport:
    """What a read skipped."""

    records: int = 0
    skipped: list[str] = field(default_factory=list)
    """A message for each line without a record, with its number from 1."""


def read_records(path: Path, report: ReadReport | None = None) -> Iterator[Record]:
    """Iterate over the records of a log that :class:`RecordLog` wrote, or of an archived tail.

    A line without a record (torn by a kill, damaged) is skipped and added to ``report``; without a report it is logged
    as a warning. Holds one record in memory. Raises NotFound if the file does not exist."""
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
    """Return the record in a line; None for a blank line or an array's bracket. Raises ValueError for any other
    content, such as a part of a record.
    """
    if not (text := strip_line(line)):
        return None
    if zeros := text.count(b"\0"):
        raise ValueError(f"{zeros:,} of its bytes are zero, as a power cut leaves them")
    record = decode(text)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    return record


def step_in(line: bytes) -> int | None:
    """Return the step of the record in a line; None if there is no record, or it has no step."""
    try:
        record = record_in(line)
    except ValueError:
        return None
    return None if record is None else step_of(record.get("global_step"))
