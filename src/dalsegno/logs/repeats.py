"""Repeats: compares the records that a resumed leg writes with those of the leg before, which were cut off the log.

Left out are metrics of the user's own that sound like a time, a speed or a use of memory; and records logged while
on_save fired, since the disk decides when that is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reader import step_in, strip_line
from .values import decode, drop_wall_clock, sounds_measured, step_of

_MISSING = "nothing"
_END_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """The first record that differs in more than its wall-clock fields."""

    log: str
    """Name of the file."""
    step: int | None
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} in {self.log} {self.before!r} before, {self.now!r} now"


class Repeats:
    """The archived tail of a log, read record by record as the log grows again.

    After the first difference, and behind the tail's last record, nothing is compared any more.
    """

    def __init__(self, archived: Path, log: Path) -> None:
        self._log = log.name
        self._lines: Iterator[bytes] | None = _records(archived)
        self.until = _last_step(archived)
        """Step of the tail's last record; 0 if none has one."""
        self.difference: RecordDifference | None = None

    def compare(self, line: bytes) -> None:
        """Compare the next record of the log, as encoded."""
        if self._lines is None or _is_of_a_save(line):
            return
        before = next(self._lines, None)
        if before is None:
            self._lines = None
        elif before != line:
            self._compare(before, decode(line))

    def _compare(self, line: bytes, now: Any) -> None:
        try:
            before = decode(line)
            if not isinstance(before, dict):
                raise ValueError(line)
        except ValueError:  # the leg was killed while it wrote this
            self._lines = None
            return
        was, found = _comparable(before), _comparable(now)
        if was == found or repr(was) == repr(found):  # NaN differs from itself
            return
        if was.get("kind") == "final" != found.get("kind"):  # the leg ended there, without a checkpoint
            self._lines = None
            return
        keys = (key for key in was | found if repr(was.get(key, _MISSING)) != repr(found.get(key, _MISSING)))
        key = next(keys)
        step = step_of(now.get("global_step"))
        self.difference = RecordDifference(self._log, step, key, was.get(key, _MISSING), found.get(key, _MISSING))
        self._lines = None


def _comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in drop_wall_clock(record).items() if not sounds_measured(key)}


def _records(archived: Path) -> Iterator[bytes]:
    with archived.open("rb") as file:
        for line in file:
            if (record := strip_line(line)) and not _is_of_a_save(record):
                yield record


def _is_of_a_save(line: bytes) -> bool:
    try:
        return b'"save"' in line and decode(line).get("kind") == "save"
    except (ValueError, AttributeError):  # the leg was killed while it wrote this
        return False


def _last_step(archived: Path) -> int:
    with archived.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        steps = map(step_in, reversed(file.read().splitlines()))
        return next((step for step in steps if step is not None), 0)
