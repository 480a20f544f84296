"""List the checkpoints at a place, from manifests and file sizes alone. Needs no torch.

A place is what a user may name: a run's ``output_dir``, its directory ``checkpoints``, or a single checkpoint.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint.format import checkpoint_dir, names
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.errors import DamagedCheckpoint, NotFound, StateMismatch
from dalsegno.policies.retention import CheckpointSummary


class CheckpointStatus(enum.StrEnum):
    """State of a directory among the checkpoints, without reading its tensors."""

    VALID = "valid"
    """The manifest is valid, and every file has the recorded size. Only checksums can show damage that remains."""
    DAMAGED = "damaged"
    """A file is missing or has another size."""
    QUARANTINED = "quarantined"
    """A run found it damaged and renamed it."""
    PARTIAL = "partial"
    """A save in progress, or what a killed save or deletion left."""
    UNREADABLE = "unreadable"
    """The manifest cannot be read (disk error, missing permission), its content may be valid."""
    NEWER = "newer"
    """Valid, but of a format that only a newer dalsegno reads."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A directory among the checkpoints.

    Attributes:
        step: from its name; None if the name has none.
        problem: one sentence; None if there is no problem.
        checkpoint: None if the manifest cannot be read.
    """

    path: Path
    step: int | None
    status: CheckpointStatus
    problem: str | None = None
    checkpoint: Checkpoint | None = None

    @property
    def size(self) -> int | None:
        """Bytes of all files that the manifest names."""
        return sum(each.size for each in self.checkpoint.manifest.files.values()) if self.checkpoint else None

    @property
    def summary(self) -> CheckpointSummary | None:
        """Input of a retention policy; None unless the checkpoint is valid."""
        if self.checkpoint is None or self.status is not CheckpointStatus.VALID:
            return None
        return self.checkpoint.manifest.summary


def list_checkpoints(place: Path) -> list[CheckpointInfo]:
    """Everything at ``place``, oldest step first.

    Raises:
        NotFound: if ``place`` does not exist or contains no checkpoints.
    """
    if is_checkpoint(place):
        return [_inspected(place)]
    directory = directory_of(place)
    paths = [
        *checkpoint_dir.newest_first(directory),
        *checkpoint_dir.quarantined(directory),
        *checkpoint_dir.partial(directory),
    ]
    if not paths:
        raise NotFound(f"{place}: there is no checkpoint")
    return sorted(map(_inspected, paths), key=lambda each: (each.step or 0, each.path.name))


def newest(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest valid one there; no file is hashed.

    Raises:
        NotFound: if there is none.
        DamagedCheckpoint: if ``place`` is a checkpoint whose manifest is missing or invalid.
    """
    if is_checkpoint(place):
        return checkpoint_dir.open_checkpoint(place)
    found = list_checkpoints(place)
    for each in reversed(found):
        if each.summary is not None and each.checkpoint is not None:
            return each.checkpoint
    raise NotFound(f"{place}: there is no valid checkpoint, only {', '.join(each.path.name for each in found)}")


def newest_verified(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest one there whose every byte matches its manifest. Renames nothing.

    Raises:
        NotFound: if there is none.
        DamagedCheckpoint: if it is damaged, or all are.
        OSError: if one cannot be read.
    """
    listed = [] if is_checkpoint(place) else list_checkpoints(place)
    valid = [each.path for each in reversed(listed) if each.status is CheckpointStatus.VALID]
    checkpoint, damaged = checkpoint_dir.first_valid(valid if listed else [place], _verified)
    if checkpoint is not None:
        return checkpoint
    if not damaged:
        raise NotFound(f"{place}: there is no valid checkpoint")
    raise DamagedCheckpoint("; ".join(map(str, damaged.values())))


def is_checkpoint(place: Path) -> bool:
    """Whether ``place`` is one checkpoint, in any status, and not a directory of checkpoints."""
    return place.name.startswith("step-") or Checkpoint.is_at(place)


def directory_of(place: Path) -> Path:
    """The checkpoints directory that belongs to ``place``.

    Raises:
        NotFound: if ``place`` is not a directory.
    """
    if not place.is_dir():
        raise NotFound(f"{place}: there is no such folder")
    if is_checkpoint(place):
        return place.parent
    inner = place / names.CHECKPOINTS
    return inner if inner.is_dir() else place


def _verified(path: Path) -> Checkpoint:
    checkpoint = checkpoint_dir.open_checkpoint(path)
    checkpoint.verify(checkpoint.manifest.files)
    return checkpoint


def _inspected(path: Path) -> CheckpointInfo:
    name, _, suffix = path.name.partition(".")
    step = names.step_of(path.with_name(name))
    if suffix == names.PARTIAL[1:]:
        return CheckpointInfo(path, step, CheckpointStatus.PARTIAL)
    damaged = CheckpointStatus.QUARANTINED if suffix else CheckpointStatus.DAMAGED
    try:
        checkpoint = checkpoint_dir.open_checkpoint(path)
    except StateMismatch as error:
        return CheckpointInfo(path, step, CheckpointStatus.NEWER, str(error))
    except DamagedCheckpoint as error:
        return CheckpointInfo(path, step, damaged, str(error))
    except OSError as error:
        return CheckpointInfo(path, step, CheckpointStatus.UNREADABLE, str(error))
    problem = _size_problem(checkpoint)
    if suffix:
        return CheckpointInfo(path, step, damaged, problem, checkpoint)
    status = damaged if problem else CheckpointStatus.VALID
    return CheckpointInfo(path, checkpoint.step, status, problem, checkpoint)


def _size_problem(checkpoint: Checkpoint) -> str | None:
    for name, expected in checkpoint.manifest.files.items():
        try:
            size = (checkpoint.path / name).lstat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != expected.size:
            return f"{name}: has {size} bytes, the manifest records {expected.size}"
    return None
