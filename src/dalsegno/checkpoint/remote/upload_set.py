"""Upload sets: files that a new host needs, collected before they are sent.

The files are the checkpoint's, the logs as they were at its save, and those that identify the run. They are staged in
``.uploading`` in the run's directory until they have been sent: hard links to the checkpoint's files, which may be
deleted meanwhile, and copies of files that are still being written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.checkpoint.json_view import readable_states
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.names import CHECKPOINTS, MANIFEST
from dalsegno.control.inbox import INBOX
from dalsegno.errors import StateMismatch
from dalsegno.logs import RunFile
from dalsegno.logs.rewind import Position
from dalsegno.system import filesystem
from dalsegno.witness import WITNESS

STAGING = ".uploading"
_RUN = "run.json"

Marks = dict[str, tuple[int, int]]
"""By name in the run: bytes of the file that were sent, and its modification time (ns)."""


@dataclass(frozen=True, slots=True)
class UploadSet:
    """``files``: by name in the run, in upload order, a manifest last."""

    files: dict[str, Path] = field(default_factory=dict)
    marks: Marks = field(default_factory=dict)


def of_run_files(run: Path, known: Marks, checkpoint: Checkpoint | None = None) -> UploadSet:
    """Changed files that belong to no checkpoint: logs, ``run.json``, files that callbacks wrote.

    Args:
        run: the run's directory.
        known: marks of earlier upload sets.
        checkpoint: logs are cut at their length when it was saved, and ``run.json`` lacks the end of its newest leg,
            since the last records do. None: as they are now, ``run.json`` last.
    """
    lengths: Mapping[str, int] = {}
    if checkpoint is not None:
        states = [*readable_states(checkpoint).values()]
        lengths = {position.path: position.offset for position in _positions_in(states)}
    collected, staging = UploadSet(), _fresh(run) / "rest"
    for name in sorted(run_files(run), key=_RUN.__eq__):
        try:
            status = (run / name).stat()
            mark = (min(status.st_size, lengths.get(name, status.st_size)), status.st_mtime_ns)
            if known.get(name) == mark:
                continue
            collected.files[name] = _copied(run / name, staging / name, mark[0])
            if name == _RUN and checkpoint is not None and RunFile(staging).withdraw_end():
                continue  # without a mark: the next set has the end
            collected.marks[name] = mark
        except FileNotFoundError:  # moved meanwhile; the next set has it
            continue
    return collected


def of_checkpoint(run: Path, checkpoint: Checkpoint) -> UploadSet:
    """All files of a published checkpoint.

    Raises:
        FileNotFoundError: if the checkpoint was deleted meanwhile.
    """
    staging, names = _fresh(run), [*checkpoint.manifest.files, MANIFEST]
    inside = f"{CHECKPOINTS}/{checkpoint.path.name}"
    return UploadSet({f"{inside}/{name}": _linked(checkpoint.path / name, staging / name) for name in names})


def run_files(run: Path) -> list[str]:
    """Names of the files that belong to no checkpoint."""
    return sorted(_run_files(run, run)) if run.is_dir() else []


def discard(run: Path) -> None:
    """Remove the staged files, or what a killed process left of them."""
    filesystem.remove(run / STAGING)


def is_run_file(name: str) -> bool:
    """Whether a file at the URL is sent by uploads and belongs neither to a checkpoint nor to an archived timeline; nor
    to the inbox of commands, where it would be one, or the witness of a process on one host.

    A hostile name could lead out of the run's directory: no part of a name begins with a dot or is empty.
    """
    *directories, _ = parts = name.split("/")
    is_odd = any(not part or part.startswith(".") for part in parts)
    return not (is_odd or CHECKPOINTS in directories or name.startswith(("rewound/", f"{INBOX}/", f"{WITNESS}/")))


def _fresh(run: Path) -> Path:
    discard(run)
    filesystem.make_directory(run / STAGING)
    return run / STAGING


def _run_files(run: Path, directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        if (
            path.name.startswith(".")
            or path.name == CHECKPOINTS
            or path in (run / INBOX, run / WITNESS)
            or path.is_symlink()
        ):
            continue
        if path.is_dir():
            yield from _run_files(run, path)
        elif path.is_file():
            yield path.relative_to(run).as_posix()


def _positions_in(state: Any) -> Iterator[Position]:
    """Log positions anywhere in the state of any callback."""
    if isinstance(state, list):
        for each in state:
            yield from _positions_in(each)
    elif isinstance(state, dict):
        try:
            yield Position.from_state(state)
        except StateMismatch:
            yield from _positions_in(list(state.values()))


def _linked(path: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # a filesystem without hard links: send the file itself, unless it is deleted meanwhile
        return path
    return target


def _copied(path: Path, target: Path, length: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    os.truncate(target, length)
    return target
