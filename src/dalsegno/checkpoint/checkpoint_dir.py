"""The folder of a run's checkpoints as it lies on disk: which there are, and how one appears and disappears.

Two kinds of directories are never taken for checkpoints: ``step-….partial`` (being written, or being deleted: the
rename to and from that name is what makes a checkpoint appear and disappear at once) and ``step-….damaged`` (failed
verification). Everything here is for one process, and needs no torch; the ranks share it through the manager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from dalsegno.errors import DamagedCheckpoint, SaveFailed
from dalsegno.system import filesystem

from .format import manifest
from .format.manifest import Checkpoint, Manifest

logger = logging.getLogger("dalsegno")

PARTIAL = ".partial"
DAMAGED = ".damaged"

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial")
_DAMAGED = re.compile(r"step-\d{8,}\.damaged(\.\d{4,})?")


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of that step is, or would be."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for any other name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else None


def newest_first(directory: Path, after: int = -1) -> list[Path]:
    """Every published checkpoint, verified or not, of a step greater than ``after``."""
    steps = {path: step for path in _children(directory) if (step := step_of(path)) is not None}
    later = [path for path in steps if steps[path] > after and path.is_dir()]
    return sorted(later, key=steps.__getitem__, reverse=True)


def partial(directory: Path) -> list[Path]:
    """Saves in progress, and what an interrupted save or deletion has left."""
    return [path for path in _children(directory) if _PARTIAL.fullmatch(path.name)]


def quarantined(directory: Path) -> list[Path]:
    """What :func:`set_aside` has renamed."""
    return [path for path in _children(directory) if _DAMAGED.fullmatch(path.name)]


def opened(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, its manifest read.

    Raises:
        NotFound: if there is none.
        DamagedCheckpoint: if the manifest is missing or wrong, or that of another step than the name says.
    """
    checkpoint = Checkpoint.open(path)
    if step_of(path) not in (None, checkpoint.step):
        raise DamagedCheckpoint(f"{path}: its manifest is that of step {checkpoint.step}")
    return checkpoint


def amend(path: Path, metrics: Mapping[str, float], best: bool) -> None:
    """Replace what a published checkpoint's manifest says of its worth. At every moment the manifest is whole.

    Raises:
        SaveFailed: if the disk does not take it.
    """
    amended = dataclasses.replace(Manifest.read(path), metrics=metrics, best=best)
    beside = path.with_name(path.name + PARTIAL)
    try:
        filesystem.write_durably(beside, amended.to_bytes())
        filesystem.rename(beside, path / manifest.FILE_NAME)
    except OSError as error:
        with contextlib.suppress(OSError):
            filesystem.remove(beside)
        raise SaveFailed(f"{path.name} is whole, but its evaluation could not be noted in it: {error}") from error


def quarantine(path: Path, error: DamagedCheckpoint) -> None:
    """Rename a checkpoint that fails verification, and say why."""
    target = path.with_name(path.name + DAMAGED)
    if target.exists():
        target = filesystem.numbered(path.parent, target.name)
    logger.warning("a damaged checkpoint is skipped and renamed to %s: %s", target.name, error)
    filesystem.rename(path, target)


def delete(path: Path) -> bool:
    """Delete a checkpoint, unless there are files in it that are not part of it: then it stays, with a warning."""
    ours = {path / name for name in Manifest.read(path).files} | {path / manifest.FILE_NAME}
    if foreign := [found for found in path.rglob("*") if found not in ours and not _is_folder(found)]:
        logger.warning("%s is not deleted: it holds %s, which is not part of it", path.name, foreign[0].name)
        return False
    hidden = path.with_name(path.name + PARTIAL)
    filesystem.rename(path, hidden)
    filesystem.remove(hidden)
    return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _children(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
