"""TensorBoard event files: rewound on resume to the checkpoint's position.

Each leg appends to a new file; a checkpoint contains the length of every file of a writer. Later bytes are moved into
``rewound/`` beside the folder, under names that TensorBoard does not read as event files. A writer's files, in the
folder and in its subfolders (of ``add_scalars``), have its suffix at the end of their names; other files are not
touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalsegno.logs.rewind import archive_file, archive_tail, free_path
from dalsegno.stateful import schema
from dalsegno.system import durability, filesystem

logger = logging.getLogger("dalsegno")

_MARK = "tfevents"  # TensorBoard reads every file with this in its name


@dataclass(frozen=True, slots=True)
class EventPosition:
    """Position of a folder of event files, as saved in a checkpoint."""

    events: schema.Count
    """Number of events written, over all legs."""
    files: dict[str, schema.Count]
    """File name to length in bytes. Names and headers depend on the number and times of the legs."""
    log_dir: str | None = None
    """As the writer was given it; None before the first save."""

    def to_state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def lengths(folder: Path, suffix: str) -> dict[str, int]:
    """Return the length in bytes of each event file in ``folder`` with this suffix, by relative path."""
    return {name: path.stat().st_size for name, path in _event_files(folder, suffix).items()}


def make_durable(folder: Path, suffix: str) -> None:
    """Fsync these files, as far as they are written, and their names. Raises NotDurable if an fsync of a directory
    fails, or has failed in this process: the name of a file may be lost.
    """
    own = _event_files(folder, suffix).values()
    for path in own:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            filesystem.fsync(descriptor, path)
        finally:
            os.close(descriptor)
    durability.flush_names(own)


def rewind_events(folder: Path, suffix: str, saved: Mapping[str, int]) -> list[Path]:
    """Rewind these files to ``saved``, a result of :func:`lengths`. Returns the archives of the later bytes."""
    archived = []
    there = _event_files(folder, suffix)
    for name, path in there.items():
        kept = saved.get(name, 0)
        size = path.stat().st_size
        if size < kept:
            logger.warning("%s is shorter than its checkpoint records: %d bytes are missing", path, kept - size)
        elif size > kept:
            archived.append(_archive(path, kept, folder.parent))
    for name in saved.keys() - there.keys():
        if saved[name]:
            logger.warning("%s no longer exists; its events are lost", folder / name)
    if archived:
        logger.info("%s: events after the checkpoint were moved to %s", folder, archived[0].parent)
    return archived


def _event_files(folder: Path, suffix: str) -> dict[str, Path]:
    found = sorted(path for path in folder.rglob(f"*{_MARK}*") if path.name.endswith(suffix))
    return {path.relative_to(folder).as_posix(): path for path in found}


def _archive(path: Path, kept: int, beside: Path) -> Path:
    """Move what follows the first ``kept`` bytes; the copy is fsynced before the file is truncated."""
    target = free_path(beside, path.name.replace(_MARK, "rewound"))
    if kept == 0:
        return archive_file(path, target)
    descriptor = os.open(path, os.O_RDWR)
    try:
        archive_tail(descriptor, kept, target)
        filesystem.truncate(descriptor, kept, path)
        filesystem.fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return target
