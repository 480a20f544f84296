"""Rewind: cuts a log back to a checkpoint's position after a restart.

:func:`rewind` decides where the log continues, and copies what follows into ``rewound/``, with an fsync. :func:`cut`
truncates the file afterwards. So a kill at any time leaves the bytes in at least one place, and repeating is safe.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import xxhash

from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.logs.reader import format_of, step_in, strip_line
from dalsegno.stateful import schema
from dalsegno.system import filesystem

from .values import step_of

logger = logging.getLogger("dalsegno")

COPY_BYTES = 1 << 20
TAIL_BYTES = 4096


def free_path(directory: Path, name: str) -> Path:
    """Return an unused path in ``directory/rewound``, creating that folder."""
    rewound = directory / "rewound"
    filesystem.make_directory(rewound)
    return filesystem.numbered(rewound, name)


def archive_file(path: Path, target: Path) -> Path:
    """Move a file into the archive; returns its new path."""
    filesystem.rename(path, target)
    filesystem.fsync_directory(path.parent)
    return target


def archive_tail(descriptor: int, offset: int, target: Path) -> None:
    """Copy what follows ``offset`` in an open file. After a kill ``target`` contains all of it, or does not exist."""
    filesystem.replace_durably_in_pieces(target, _pieces(descriptor, offset))


def _pieces(descriptor: int, offset: int) -> Iterator[bytes]:
    while piece := os.pread(descriptor, COPY_BYTES, offset):
        yield piece
        offset += len(piece)


Action = Literal["started", "unchanged", "rewound", "shorter", "differs", "gone", "restarted"]


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a log, as saved in a checkpoint."""

    path: str
    """Relative to the run's ``output_dir``, with forward slashes."""
    offset: schema.Count
    """Bytes up to the end of the last record, without the closing bracket of a JSON array."""
    records: schema.Count
    last_step: Annotated[Any, schema.Must("an integer or None", lambda step: step is None or isinstance(step, int))]
    """``global_step`` of the last record that has one."""
    tail: str
    """xxh3-128, as hex, of the last bytes (up to 4096) before ``offset``."""

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """Parse a checkpoint's state. Raises StateMismatch if it is malformed."""
        schema.check(state, Position, "a log's saved state")
        return cls(**{**state, "last_step": step_of(state["last_step"])})


@dataclass(frozen=True, slots=True)
class RewindReport:
    """What opening a log found and did."""

    action: Action
    """``started`` (no state, no file), ``restarted`` (no state, file archived), or a row of the rewind table."""
    path: Path
    """The file to write."""
    offset: int
    records: int
    last_step: int | None
    archived: Path | None = None
    """Archive of the bytes after the checkpoint, unchanged."""
    missing_records: int = 0
    """Number of records that the checkpoint counted and the file does not contain."""


def rewind(root: Path, configured: PurePosixPath, saved: Position | None) -> RewindReport:
    """Determine where the log continues, and archive what must not stay in it. Raises StateMismatch if the state
    belongs to another log; ConfigurationError if a folder, a pipe or another special file has the log's name.

    ``configured``: the path of a new run's log, relative to ``root``.
    """
    if saved is None:
        _check_regular_file(root / configured)
        return _restart(root / configured)
    if not _same_log(saved.path, configured):
        raise StateMismatch(
            f"the checkpoint's log is {saved.path!r}, this one is {str(configured)!r}; give it the earlier path to "
            "continue it, or another name= to start a new one"
        )
    path = root / saved.path
    _check_regular_file(path)
    if not path.exists():
        logger.warning("%s no longer exists; %d records are lost, starting it again", path, saved.records)
        return _new_file("gone", path, missing=saved.records)
    descriptor = filesystem.open_own(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size < saved.offset:
            return _keep_shorter(path, descriptor, saved)
        if tail_hash(descriptor, saved.offset) != saved.tail:
            if _starts_after(descriptor, saved):
                logger.warning("%s was started after the checkpoint, which counted %d records", path, saved.records)
                return replace(_restart(path), missing_records=saved.records)
            return _start_successor(root / configured, path, saved)
        archived = _archive_rest(path, descriptor, saved.offset)
    finally:
        os.close(descriptor)
    return RewindReport(
        "rewound" if archived else "unchanged", path, saved.offset, saved.records, saved.last_step, archived
    )


def cut(descriptor: int, path: Path, offset: int, *, is_empty: bool) -> None:
    """Cut an open log off after ``offset``, the end of its last record, and end it with the format's foot.

    What is cut off is in the archive, or is a record that was not written completely. Writes nothing if the file
    already ends there. ``is_empty``: whether the log has no record, so that its head may be missing."""
    head, foot = (shape := format_of(path)).head, shape.foot
    if is_empty and os.pread(descriptor, len(head), 0) != head:
        filesystem.write_all(descriptor, head, path)
    if os.pread(descriptor, len(foot) + 1, offset) == foot:
        return
    if foot:  # before the truncation: a last line without its newline would look torn
        os.lseek(descriptor, offset, os.SEEK_SET)
        filesystem.write_all(descriptor, foot, path)
    filesystem.truncate(descriptor, offset + len(foot), path)


def _check_regular_file(path: Path) -> None:
    """Raises ConfigurationError if the log's name is not a regular file's. Opening a pipe would block forever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise ConfigurationError(f"{path}: is {kind}; move it away, or give the logger another path=")


def tail_hash(descriptor: int, offset: int) -> str:
    """Return the xxh3-128 of the last bytes, up to 4096, before ``offset``."""
    start = max(0, offset - TAIL_BYTES)
    return xxhash.xxh3_128_hexdigest(os.pread(descriptor, offset - start, start))


def _same_log(saved: str, configured: PurePosixPath) -> bool:
    """Whether ``saved`` is the configured path, or its successor ``<name>-2``."""
    stem, suffix = re.escape(str(configured.with_suffix(""))), re.escape(configured.suffix)
    return re.fullmatch(rf"{stem}(-[0-9]+)?{suffix}", saved) is not None


def _new_file(action: Action, path: Path, archived: Path | None = None, missing: int = 0) -> RewindReport:
    return RewindReport(action, path, len(format_of(path).head), 0, None, archived, missing)


def _restart(path: Path) -> RewindReport:
    """Archive records that no checkpoint contains: the leg that wrote them died before its first save."""
    shape = format_of(path)
    if not path.exists() or _is_empty(path, shape.head + shape.foot):
        return _new_file("started", path)
    target = archive_file(path, free_path(path.parent, path.name))
    logger.info("%s: no checkpoint contains its records; moved them to %s", path, target)
    return _new_file("restarted", path, target)


def _is_empty(path: Path, empty: bytes) -> bool:
    descriptor = filesystem.open_own(path, os.O_RDONLY)
    try:
        return empty.startswith(os.pread(descriptor, len(empty) + 1, 0))
    finally:
        os.close(descriptor)


def _starts_after(descriptor: int, saved: Position) -> bool:
    """Whether the file's first step is later than the checkpoint: a leg that died since has started the file."""
    if saved.last_step is None:
        return False
    with open(descriptor, "rb", closefd=False) as file:
        first = next((step for line in file if (step := step_in(line)) is not None), None)
    return first is not None and first > saved.last_step


def _archive_rest(path: Path, descriptor: int, offset: int) -> Path | None:
    """Copy what follows ``offset`` into ``rewound/``; None if only the foot, or a part of it, follows."""
    foot = format_of(path).foot
    if foot.startswith(os.pread(descriptor, len(foot) + 1, offset)):
        return None
    target = free_path(path.parent, path.name)
    archive_tail(descriptor, offset, target)
    logger.info("%s: copied %d bytes after the checkpoint to %s", path, target.stat().st_size, target)
    return target


def _keep_shorter(path: Path, descriptor: int, saved: Position) -> RewindReport:
    """Continue a truncated file after its last complete record up to the checkpoint's step.

    Later records come from a leg that continued in a file that was truncated, or replaced by an older copy.
    """
    shape = format_of(path)
    end, records, last, position = len(shape.head), 0, b"", 0
    with open(descriptor, "rb", closefd=False) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if record := strip_line(line):
                if (step := step_in(record)) is not None and saved.last_step is not None and step > saved.last_step:
                    break
                records, last = records + 1, record
                end = position + (len(line if shape.after else line.rstrip(b",\n")))
            position += len(line)
    missing = max(0, saved.records - records)
    logger.warning(
        "%s is shorter than its checkpoint records: %d of %d records are missing; continuing with the rest",
        path,
        missing,
        saved.records,
    )
    if records == 0:
        return replace(_restart(path), action="shorter", missing_records=missing)
    archived = _archive_rest(path, descriptor, end)
    return RewindReport("shorter", path, end, records, step_in(last), archived, missing)


def _start_successor(configured: Path, path: Path, saved: Position) -> RewindReport:
    """Continue in a new file: the bytes before the offset are not those that were saved, so the file is another's."""
    number = 2
    while (successor := configured.with_name(f"{configured.stem}-{number}{configured.suffix}")).exists():
        number += 1
    logger.warning(
        "%s is not the checkpoint's file: it differs before byte %d; it is left unchanged, and the log continues in %s",
        path,
        saved.offset,
        successor,
    )
    return _new_file("differs", successor)
