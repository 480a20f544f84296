"""Where a log goes on after a restart: the rewind table.

Nothing here cuts a file. What lies behind the checkpoint is first copied into ``rewound/`` and forced to
the disk; the writer cuts afterwards, so a kill at any moment leaves the bytes in one place at least, and a
second try is safe.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypedDict

import xxhash

from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful import schema
from dalsegno.system import filesystem

from .archive import archive_tail, archive_whole, free_place
from .formats import format_of, strip_line
from .values import decode

logger = logging.getLogger("dalsegno")

TAIL_BYTES = 4096

Action = Literal["started", "unchanged", "rewound", "shorter", "differs", "gone", "restarted"]


class PositionState(TypedDict):
    path: str
    offset: schema.Count
    records: schema.Count
    last_step: Annotated[Any, schema.Must("a whole number or None", lambda step: step is None or isinstance(step, int))]
    tail: str


@dataclass(frozen=True, slots=True)
class Position:
    """How far a log has come. A checkpoint holds this."""

    path: str
    """Relative to the run's ``output_dir``, with forward slashes."""
    offset: int
    """Bytes up to the end of the last record; the closing bracket of a JSON array lies behind it."""
    records: int
    last_step: int | None
    """``global_step`` of the last record that had one."""
    tail: str
    """xxh3-128, in hex, of the last bytes (up to 4096) before ``offset``."""

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """The position in a checkpoint's state.

        Raises:
            StateMismatch: if it is none.
        """
        schema.check(state, PositionState, "a log's saved state")
        return cls(**{**state, "last_step": step_of(state["last_step"])})


@dataclass(frozen=True, slots=True)
class RewindReport:
    """What opening a log has found and done."""

    action: Action
    """``started`` (no state, no file), ``restarted`` (no state, the file archived), or a row of the table."""
    path: Path
    """The file that is now written."""
    offset: int
    records: int
    last_step: int | None
    archived: Path | None = None
    """Where the bytes behind the checkpoint are now, untouched."""
    missing_records: int = 0
    """Records that the checkpoint knew and the file does not have."""


def rewind(root: Path, configured: PurePosixPath, saved: Position | None) -> RewindReport:
    """Decide where the log goes on, and archive what must not stay.

    ``configured`` is its path in a new run, relative to ``root``.

    Raises:
        StateMismatch: if the state is that of another log.
        ConfigurationError: if a folder, a pipe or the like has the log's name.
    """
    if saved is None:
        _expect_plain(root / configured)
        return _start_over(root / configured)
    if not _same_log(saved.path, configured):
        raise StateMismatch(
            f"the checkpoint's log is {saved.path!r}, this one is {str(configured)!r}; give it the former path to "
            "go on with it, or another name= to begin a new one"
        )
    path = root / saved.path
    _expect_plain(path)
    if not path.exists():
        logger.warning("%s is gone, and with it %d records; it starts anew", path, saved.records)
        return _fresh("gone", path, missing=saved.records)
    descriptor = filesystem.open_own(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size < saved.offset:
            return _keep_shorter(path, descriptor, saved)
        if tail_hash(descriptor, saved.offset) != saved.tail:
            if _begins_after(descriptor, saved):
                logger.warning("%s was begun anew after the checkpoint, which knew %d records", path, saved.records)
                return replace(_start_over(path), missing_records=saved.records)
            return _leave_alone(root / configured, path, saved)
        archived = _archive_rest(path, descriptor, saved.offset)
    finally:
        os.close(descriptor)
    return RewindReport(
        "rewound" if archived else "unchanged", path, saved.offset, saved.records, saved.last_step, archived
    )


def _expect_plain(path: Path) -> None:
    """
    Raises:
        ConfigurationError: if something else than a file has the name of a log. A pipe would be waited on for ever.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a plain file"
        raise ConfigurationError(f"{path}: is {kind}; move it away, or give the logger another path=")


def tail_hash(descriptor: int, offset: int) -> str:
    """xxh3-128 of the last bytes, up to 4096, before ``offset``."""
    start = max(0, offset - TAIL_BYTES)
    return xxhash.xxh3_128_hexdigest(os.pread(descriptor, offset - start, start))


def _same_log(saved: str, configured: PurePosixPath) -> bool:
    """Whether ``saved`` is the configured path, or the ``<name>-2`` that the log has moved to since."""
    stem, suffix = re.escape(str(configured.with_suffix(""))), re.escape(configured.suffix)
    return re.fullmatch(rf"{stem}(-[0-9]+)?{suffix}", saved) is not None


def _fresh(action: Action, path: Path, archived: Path | None = None, missing: int = 0) -> RewindReport:
    return RewindReport(action, path, len(format_of(path).head), 0, None, archived, missing)


def _start_over(path: Path) -> RewindReport:
    """No checkpoint knows what is there: a leg wrote it that died before its first one."""
    shape = format_of(path)
    if not path.exists() or _holds_nothing(path, shape.head + shape.foot):
        return _fresh("started", path)
    target = free_place(path.parent, path.name)
    archive_whole(path, target)
    logger.info("%s: no checkpoint knows these records; they are now in %s", path, target)
    return _fresh("restarted", path, target)


def _holds_nothing(path: Path, empty: bytes) -> bool:
    descriptor = filesystem.open_own(path, os.O_RDONLY)
    try:
        return empty.startswith(os.pread(descriptor, len(empty) + 1, 0))
    finally:
        os.close(descriptor)


def _begins_after(descriptor: int, saved: Position) -> bool:
    """Whether the file's first step is one that the checkpoint could not know: a leg that is dead has begun it."""
    if saved.last_step is None:
        return False
    with open(descriptor, "rb", closefd=False) as file:
        steps = (_step_of(record) for line in file if (record := strip_line(line)))
        first = next((step for step in steps if step is not None), None)
    return first is not None and first > saved.last_step


def _archive_rest(path: Path, descriptor: int, offset: int) -> Path | None:
    """Copy what follows ``offset`` into ``rewound/``; None where only the foot, or a part of it, follows."""
    foot = format_of(path).foot
    if foot.startswith(os.pread(descriptor, len(foot) + 1, offset)):
        return None
    target = free_place(path.parent, path.name)
    archive_tail(descriptor, offset, target)
    logger.info("%s: %d bytes that came after the checkpoint are now in %s", path, target.stat().st_size, target)
    return target


def _keep_shorter(path: Path, descriptor: int, saved: Position) -> RewindReport:
    """The file has lost its end: go on behind its last whole record of a step that the checkpoint knew.

    Later ones are of a leg that went on in a file that was cut, or replaced by an older copy, while it lived.
    """
    shape = format_of(path)
    end, records, last, position = len(shape.head), 0, b"", 0
    with open(descriptor, "rb", closefd=False) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if record := strip_line(line):
                if (step := _step_of(record)) is not None and saved.last_step is not None and step > saved.last_step:
                    break
                records, last = records + 1, record
                end = position + (len(line if shape.after else line.rstrip(b",\n")))
            position += len(line)
    missing = max(0, saved.records - records)
    logger.warning(
        "%s is shorter than the checkpoint knew it: %d of %d records are missing; it goes on with those left",
        path,
        missing,
        saved.records,
    )
    if records == 0:
        return replace(_start_over(path), action="shorter", missing_records=missing)
    archived = _archive_rest(path, descriptor, end)
    return RewindReport("shorter", path, end, records, _step_of(last), archived, missing)


def step_of(value: object) -> int | None:
    """``value`` if it can be a step's number: a record has what a callback has put into it."""
    return value if type(value) is int and value >= 0 else None


def _step_of(line: bytes) -> int | None:
    try:
        return step_of(decode(line).get("global_step"))
    except (ValueError, AttributeError):
        return None


def _leave_alone(configured: Path, path: Path, saved: Position) -> RewindReport:
    """The bytes before the offset are not those that were saved: somebody else's file. Go on in a new one."""
    number = 2
    while (successor := configured.with_name(f"{configured.stem}-{number}{configured.suffix}")).exists():
        number += 1
    logger.warning(
        "%s is not the file that the checkpoint knew: it differs before byte %d; it stays as it is, and the "
        "log goes on in %s",
        path,
        saved.offset,
        successor,
    )
    return _fresh("differs", successor)
