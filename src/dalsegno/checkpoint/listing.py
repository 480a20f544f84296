"""List the checkpoints at a place, from manifests and file sizes alone. Needs no torch.

A place is what a user may name: a run's ``output_dir``, its directory ``checkpoints``, or a single checkpoint.
"""

from __future__ import annotations

import enum
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.json_view import readable_states
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.errors import DamagedCheckpoint, NotFound, StateMismatch
from dalsegno.policies.retention import Best, CheckpointSummary, Retention, rules_of

logger = logging.getLogger("dalsegno")


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
    """A directory among the checkpoints. ``step``: from its name, if it has one. ``problem``: one sentence.
    ``checkpoint``: None if the manifest cannot be read."""

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
    """Everything at ``place``, oldest step first. Raises NotFound if that is nothing."""
    if is_checkpoint(place):
        return [_inspected(place)]
    directory = directory_of(place)
    paths = [
        *checkpoint_dir.published(directory).values(),
        *checkpoint_dir.quarantined(directory),
        *checkpoint_dir.partial(directory),
    ]
    if not paths:
        raise NotFound(f"{place}: there is no checkpoint")
    return sorted(map(_inspected, paths), key=lambda each: (each.step or 0, each.path.name))


def newest(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest valid one there; no file is hashed. Raises NotFound if there is
    none."""
    if is_checkpoint(place):
        return Checkpoint.open(place)
    found = list_checkpoints(place)
    for each in reversed(found):
        if each.summary is not None and each.checkpoint is not None:
            return each.checkpoint
    raise NotFound(f"{place}: there is no valid checkpoint, only {', '.join(each.path.name for each in found)}")


def newest_verified(place: Path) -> Checkpoint:
    """The checkpoint at ``place``, or the newest one there whose every byte matches its manifest. Renames nothing.
    Raises NotFound if there is none."""
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
    if not place.is_dir():
        raise NotFound(f"{place}: there is no such folder")
    if is_checkpoint(place):
        return place.parent
    inner = place / names.CHECKPOINTS
    return inner if inner.is_dir() else place


def _verified(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    checkpoint.verify(checkpoint.manifest.files)
    return checkpoint


def _inspected(path: Path) -> CheckpointInfo:
    name, _, suffix = path.name.partition(".")
    step = names.step_of(path.with_name(name))
    if suffix == names.PARTIAL[1:]:
        return CheckpointInfo(path, step, CheckpointStatus.PARTIAL)
    damaged = CheckpointStatus.QUARANTINED if suffix else CheckpointStatus.DAMAGED
    try:
        checkpoint = Checkpoint.open(path)
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


class Summaries:
    """Summaries of the valid checkpoints in a directory, which is listed again and again. A checkpoint is read again
    once its manifest or one of its folders has changed, or may have: files appear and disappear there by that."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[CheckpointSummary, _Marks]] = {}

    def of(self, directory: Path) -> list[CheckpointSummary]:
        """Oldest first. Logs and skips checkpoints that are not valid."""
        former, self._known = self._known, {}
        for path in reversed(checkpoint_dir.published(directory).values()):
            if path in former and all(mark and _mark(place) == mark for place, mark in former[path][1].items()):
                self._known[path] = former[path]
                continue
            folders = (Path(folder) for folder, _, _ in os.walk(path))
            # Before it is read: what changes meanwhile is seen the next time.
            marks = {place: _mark(place) for place in (path / names.MANIFEST, *folders)}
            found = _inspected(path)
            if found.checkpoint is None or found.summary is None:
                logger.warning("%s is left out: %s", found.path.name, found.problem)
                continue
            self._known[path] = found.summary, marks
        return [summary for summary, _ in self._known.values()]


_Marks = Mapping[Path, int | None]

_TICK = 10_000_000
"""Nanoseconds at most from one tick of the clock of local file systems to the next."""


def _mark(place: Path) -> int | None:
    """When a file or folder has changed, in nanoseconds. None if it is gone, or has changed within this tick of the
    clock, in which a further change would bear the same time."""
    settled = time.time_ns() - _TICK
    try:
        changed = place.stat().st_ctime_ns
    except OSError:
        return None
    return changed if changed <= settled else None


Inodes = Mapping[tuple[int, int], int]
"""Size in bytes of each file, by device and inode number."""


def inodes_of(checkpoint: Path) -> Inodes:
    """The files of a checkpoint, without its manifest, and without those that are removed meanwhile."""
    found = {}
    for folder, _, files in os.walk(checkpoint):
        for path in (Path(folder, name) for name in files if name != names.MANIFEST):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[status.st_dev, status.st_ino] = status.st_size
    return found


def added_bytes(checkpoints: Sequence[Path]) -> dict[Path, int]:
    """Bytes that each checkpoint adds on the disk to those before it. Their sum is what all of them take."""
    seen: set[tuple[int, int]] = set()
    added = {}
    for path in checkpoints:
        own = inodes_of(path)
        added[path] = _bytes_apart_from(own, seen)
        seen |= own.keys()
    return added


def freed_bytes(checkpoint: Path, others: Iterable[Path]) -> int:
    """Bytes that the deletion of a checkpoint frees while ``others`` stay."""
    return _bytes_apart_from(inodes_of(checkpoint), {inode for other in others for inode in inodes_of(other)})


def _bytes_apart_from(inodes: Inodes, others: set[tuple[int, int]]) -> int:
    return sum(size for inode, size in inodes.items() if inode not in others)


ALL_STAY = "all stay"
"""Reason if there is no rule."""
NEWEST = "newest"
"""Reason for the newest valid checkpoint, which every rule keeps."""

_SETTINGS = (
    "keep",
    "save_total_limit",
    "save_strategy",
    "save_steps",
    "save",
    "eval_strategy",
    "eval_steps",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)


def rule_of_run(found: Sequence[CheckpointInfo]) -> Retention | None:
    """Retention rule that the newest valid checkpoint was saved under; None if it keeps all, or cannot be read."""
    args = _args_of_run(found)
    return None if args is None else args.keeping


def best_step(found: Sequence[CheckpointInfo]) -> int | None:
    """Step of the valid checkpoint whose own evaluation was the best, by the run's metric; None if no step of theirs
    was evaluated."""
    rule: Retention = Best()
    if (args := _args_of_run(found)) is not None:
        rule = rule.with_metric(args.best_metric_name, greater=args.best_is_greater)
    return next(iter(rule([each.summary for each in found if each.summary is not None and each.summary.finite])), None)


def _args_of_run(found: Sequence[CheckpointInfo]) -> TrainingArguments | None:
    """The settings of the newest valid checkpoint about evaluations and checkpoints; None if they cannot be read."""
    checkpoint = next((each.checkpoint for each in reversed(found) if each.summary is not None), None)
    if checkpoint is None:
        return None
    try:
        (settings,) = readable_states(checkpoint)["settings"]
        known = {name: settings[name] for name in _SETTINGS if name in settings}
        return TrainingArguments(".", **known)
    except (KeyError, ValueError, TypeError, DamagedCheckpoint):
        return None


def reasons(rule: Retention | None, entries: Sequence[CheckpointSummary]) -> dict[int, list[str]]:
    """By step, the parts of the rule (None keeps all) that keep the checkpoint, as the user wrote them; empty if none
    does. ``entries``: the valid checkpoints of a run, oldest first."""
    if rule is None:
        return {entry.step: [ALL_STAY] for entry in entries}
    kept: dict[int, list[str]] = {entry.step: [] for entry in entries}
    for part in rules_of(rule):
        for step in part([entry for entry in entries if entry.finite]):
            kept[step].append(repr(part))
    for entry in entries[-1:]:
        kept[entry.step].append(NEWEST)
    return kept
