"""What a new host shall find: a checkpoint, the logs as they were when it was taken, and what says which run it is.

A snapshot lies in ``.uploading`` in the run's folder until it has been sent: links to the checkpoint's files, which may
be deleted meanwhile, and copies of what goes on being written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.checkpoint.format.manifest import FILE_NAME, Checkpoint
from dalsegno.checkpoint.inspect.json_view import readable_states
from dalsegno.errors import StateMismatch
from dalsegno.logs.rewind import Position
from dalsegno.system import filesystem

FOLDER = ".uploading"
CHECKPOINTS = "checkpoints"

Marks = dict[str, tuple[int, int]]
"""By a file's name in the run: the bytes of it that were taken, and when it was changed last (ns)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``files``: by their names in the run, in the order in which they are to be sent, a manifest last."""

    files: dict[str, Path] = field(default_factory=dict)
    marks: Marks = field(default_factory=dict)

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(path.stat().st_size for path in self.files.values())


def of_rest(run: Path, known: Marks, checkpoint: Checkpoint | None = None) -> Snapshot:
    """Every file that belongs to no checkpoint (logs, ``run.json``, what callbacks have written), if it has changed.

    Args:
        run: the run's folder.
        known: what earlier snapshots have taken.
        checkpoint: logs are taken up to where they were when it was; None: as they are.
    """
    lengths: Mapping[str, int] = {}
    if checkpoint is not None:
        lengths = {position.path: position.offset for position in _positions(checkpoint)}
    snapshot, place = Snapshot(), _fresh(run) / "rest"
    for name in names_of_rest(run):
        try:
            status = (run / name).stat()
            mark = (min(status.st_size, lengths.get(name, status.st_size)), status.st_mtime_ns)
            if known.get(name) != mark:
                snapshot.files[name] = _copied(run / name, place / name, mark[0])
                snapshot.marks[name] = mark
        except FileNotFoundError:  # moved meanwhile: there will be a next time
            continue
    return snapshot


def of_checkpoint(run: Path, checkpoint: Checkpoint) -> Snapshot:
    """All files of a published checkpoint.

    Raises:
        FileNotFoundError: if it was deleted meanwhile.
    """
    place, names = _fresh(run), [*checkpoint.manifest.files, FILE_NAME]
    inside = f"{CHECKPOINTS}/{checkpoint.path.name}"
    return Snapshot({f"{inside}/{name}": _linked(checkpoint.path / name, place / name) for name in names})


def names_of_rest(run: Path) -> list[str]:
    """Of every file that belongs to no checkpoint."""
    return sorted(_rest(run, run)) if run.is_dir() else []


def discard(run: Path) -> None:
    """Remove the snapshot, or what a killed process has left of one."""
    filesystem.remove(run / FOLDER)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of that name belongs to a checkpoint, also to one in a timeline that was left."""
    return CHECKPOINTS in name.split("/")[:-1]


def is_rest(name: str) -> bool:
    """Whether a file of that name there is one that is sent, and belongs to no checkpoint, nor to a timeline left.

    An enemy's name could lead out of the run's folder: none begins with a dot, or a slash, or has two of them together.
    """
    is_odd = any(not part or part.startswith(".") for part in name.split("/"))
    return not (is_odd or is_checkpoint_file(name) or name.startswith("rewound/"))


def _fresh(run: Path) -> Path:
    discard(run)
    filesystem.make_directory(run / FOLDER)
    return run / FOLDER


def _rest(run: Path, folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == CHECKPOINTS or path.is_symlink():
            continue
        if path.is_dir():
            yield from _rest(run, path)
        elif path.is_file():
            yield path.relative_to(run).as_posix()


def _positions(checkpoint: Checkpoint) -> Iterator[Position]:
    for states in readable_states(checkpoint).values():
        yield from _positions_in(states)


def _positions_in(state: Any) -> Iterator[Position]:
    """Wherever in the state of whatever callback they are."""
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
    except OSError:  # a filesystem without links: the file itself will do, unless it is deleted meanwhile
        return path
    return target


def _copied(path: Path, target: Path, length: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    os.truncate(target, length)
    return target
