"""What checkpoints there are at a place, at a glance: from manifests and file sizes alone, without torch.

A place is whatever a person may name: a run's ``output_dir``, its folder ``checkpoints``, or a single checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DamagedCheckpoint, NotFound, StateMismatch
from dalsegno.policies.retention import Entry

from . import checkpoint_dir
from .format import manifest
from .format.manifest import Checkpoint


class CheckpointStatus(enum.StrEnum):
    """How a directory among the checkpoints looks from outside."""

    WHOLE = "whole"
    """Its manifest is sound, and every file has the size that it says. Only hashing tells more."""
    DAMAGED = "damaged"
    """Something is missing, or of another size."""
    SET_ASIDE = "set aside"
    """A run has found it damaged, and renamed it."""
    PARTIAL = "partial"
    """A save in progress, or what a killed save or deletion has left."""
    UNREADABLE = "unreadable"
    """Its manifest cannot be read: the disk does not answer, or rights are missing. That says nothing about it."""
    NEWER = "newer"
    """Whole, but of a format that only a newer dalsegno reads."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A directory among the checkpoints.

    Attributes:
        step: from its name; None if that tells none.
        problem: what is wrong with it, as one sentence, if something is.
        checkpoint: None where the manifest cannot be read.
    """

    path: Path
    step: int | None
    condition: CheckpointStatus
    problem: str | None = None
    checkpoint: Checkpoint | None = None

    @property
    def size(self) -> int | None:
        """Bytes of all files that the manifest names."""
        return sum(each.size for each in self.checkpoint.manifest.files.values()) if self.checkpoint else None

    @property
    def entry(self) -> Entry | None:
        """What a policy is to know of it; None for what is no whole checkpoint."""
        if self.checkpoint is None or self.condition is not CheckpointStatus.WHOLE:
            return None
        its = self.checkpoint.manifest
        return Entry(its.step, its.metrics, its.best, its.finite)


def list_checkpoints(place: Path) -> list[CheckpointInfo]:
    """Everything at ``place``, the oldest step first.

    Raises:
        NotFound: if it is no place where checkpoints are, or there are none.
    """
    if is_checkpoint(place):
        return [_looked_at(place)]
    directory = directory_of(place)
    found = [*_published(directory), *_set_aside(directory), *_partial(directory)]
    if not found:
        raise NotFound(f"{place}: there is no checkpoint")
    return sorted(found, key=lambda each: (each.step or 0, each.path.name))


def newest(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest one there that is whole at a glance.

    Raises:
        NotFound: if there is none.
        DamagedCheckpoint: if ``place`` is one, but its manifest is missing or wrong.
    """
    if is_checkpoint(place):
        return checkpoint_dir.opened(place)
    problems = []
    for each in reversed(list_checkpoints(place)):
        if each.condition is CheckpointStatus.WHOLE and each.checkpoint is not None:
            return each.checkpoint
        problems.append(each.path.name)
    raise NotFound(f"{place}: there is no whole checkpoint, only {', '.join(reversed(problems))}")


def verified(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest one there that verifies: every byte is read. Nothing is renamed.

    Raises:
        NotFound: if there is none.
        DamagedCheckpoint: if it is damaged, or all are.
        OSError: if one cannot be read.
    """
    if is_checkpoint(place):
        candidates = [checkpoint_dir.opened(place)]
    else:
        found = [each for each in reversed(list_checkpoints(place)) if each.condition is CheckpointStatus.WHOLE]
        candidates = [each.checkpoint for each in found if each.checkpoint is not None]
    problems = []
    for checkpoint in candidates:
        try:
            checkpoint.verify(checkpoint.manifest.files)
        except DamagedCheckpoint as error:
            problems.append(str(error))
        else:
            return checkpoint
    if not problems:
        raise NotFound(f"{place}: there is no whole checkpoint")
    raise DamagedCheckpoint("; ".join(problems))


def is_checkpoint(place: Path) -> bool:
    """Whether ``place`` is one checkpoint, in whatever condition, and not a folder of them."""
    return place.name.startswith("step-") or (place / manifest.FILE_NAME).exists()


def directory_of(place: Path) -> Path:
    """The folder of checkpoints that belongs to ``place``.

    Raises:
        NotFound: if it is no directory.
    """
    if not place.is_dir():
        raise NotFound(f"{place}: there is no such folder")
    if is_checkpoint(place):
        return place.parent
    inner = place / "checkpoints"
    return inner if inner.is_dir() else place


def _published(directory: Path) -> Iterator[CheckpointInfo]:
    for path in checkpoint_dir.newest_first(directory):
        yield _looked_at(path)


def _set_aside(directory: Path) -> Iterator[CheckpointInfo]:
    for path in checkpoint_dir.quarantined(directory):
        yield _looked_at(path)


def _partial(directory: Path) -> Iterator[CheckpointInfo]:
    for path in checkpoint_dir.partial(directory):
        yield _looked_at(path)


def _looked_at(path: Path) -> CheckpointInfo:
    name, _, mark = path.name.partition(".")
    step = checkpoint_dir.step_of(path.with_name(name))
    if mark.startswith(checkpoint_dir.PARTIAL[1:]):
        return CheckpointInfo(path, step, CheckpointStatus.PARTIAL)
    try:
        checkpoint = checkpoint_dir.opened(path)
    except StateMismatch as error:
        return CheckpointInfo(path, step, CheckpointStatus.NEWER, str(error))
    except DamagedCheckpoint as error:
        return CheckpointInfo(path, step, CheckpointStatus.SET_ASIDE if mark else CheckpointStatus.DAMAGED, str(error))
    except OSError as error:
        return CheckpointInfo(path, step, CheckpointStatus.UNREADABLE, str(error))
    problem = _wrong_size(checkpoint)
    if mark:
        return CheckpointInfo(path, step, CheckpointStatus.SET_ASIDE, problem, checkpoint)
    condition = CheckpointStatus.DAMAGED if problem else CheckpointStatus.WHOLE
    return CheckpointInfo(path, checkpoint.step, condition, problem, checkpoint)


def _wrong_size(checkpoint: Checkpoint) -> str | None:
    for name, expected in checkpoint.manifest.files.items():
        try:
            size = (checkpoint.path / name).lstat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != expected.size:
            return f"{name}: has {size} bytes, the manifest says {expected.size}"
    return None
