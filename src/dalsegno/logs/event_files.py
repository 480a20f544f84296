"""TensorBoard's event files, cut back on resume to where the checkpoint was taken.

A leg appends to a file of its own; a checkpoint knows every file of a writer and how long it was. What came later
goes into ``rewound/`` beside the folder, under names that TensorBoard does not take for event files. A writer's files
bear its mark at the end of their names, in the folder and below it (``add_scalars`` makes folders): those of others are
left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from dalsegno.stateful import schema
from dalsegno.system import filesystem

from .archive import archive_tail, archive_whole, free_place

logger = logging.getLogger("dalsegno")

_MARK = "tfevents"  # TensorBoard reads whatever has this in its name


class EventState(TypedDict):
    events: schema.Count
    files: dict[str, schema.Count]


@dataclass(frozen=True, slots=True)
class EventPosition:
    """How far a folder of event files has come. A checkpoint holds this."""

    events: int
    """Written so far, over all legs."""
    files: Mapping[str, int]
    """Name to length in bytes. Names and headers depend on how many legs there were, and when."""

    def to_state(self) -> EventState:
        return {"events": self.events, "files": dict(self.files)}

    @classmethod
    def from_state(cls, state: Any) -> EventPosition:
        """The position in a checkpoint's state.

        Raises:
            StateMismatch: if it is none.
        """
        schema.check(state, EventState, "the saved state of a writer of event files")
        return cls(**state)


def lengths(folder: Path, suffix: str) -> dict[str, int]:
    """Bytes of each event file in ``folder`` whose name ends so, by its path in there."""
    return {name: path.stat().st_size for name, path in _event_files(folder, suffix).items()}


def make_durable(folder: Path, suffix: str) -> None:
    """Force these files, as far as they are written, and their names to the disk."""
    own = _event_files(folder, suffix).values()
    for path in own:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            filesystem.fsync(descriptor, path)
        finally:
            os.close(descriptor)
    for directory in {path.parent for path in own}:
        filesystem.fsync_directory(directory)


def rewind_events(folder: Path, suffix: str, saved: Mapping[str, int]) -> list[Path]:
    """Bring these files back to ``saved``, a result of :func:`lengths`; gives where what came later is now."""
    archived = []
    there = _event_files(folder, suffix)
    for name, path in there.items():
        kept = saved.get(name, 0)
        size = path.stat().st_size
        if size < kept:
            logger.warning("%s is shorter than the checkpoint knew it: %d bytes are missing", path, kept - size)
        elif size > kept:
            archived.append(_archive(path, kept, folder.parent))
    for name in saved.keys() - there.keys():
        if saved[name]:
            logger.warning("%s is gone, and with it what it held", folder / name)
    if archived:
        logger.info("%s: what came after the checkpoint is now in %s", folder, archived[0].parent)
    return archived


def _event_files(folder: Path, suffix: str) -> dict[str, Path]:
    found = sorted(path for path in folder.rglob(f"*{_MARK}*") if path.name.endswith(suffix))
    return {path.relative_to(folder).as_posix(): path for path in found}


def _archive(path: Path, kept: int, beside: Path) -> Path:
    """Move what follows the first ``kept`` bytes; the copy is on the disk before the file is cut."""
    target = free_place(beside, path.name.replace(_MARK, "rewound"))
    if kept == 0:
        archive_whole(path, target)
        return target
    descriptor = os.open(path, os.O_RDWR)
    try:
        archive_tail(descriptor, kept, target)
        filesystem.truncate(descriptor, kept, path)
        filesystem.fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return target
