"""A run's checkpoints directory: which checkpoints it contains, and each way in which one appears or disappears.

A rename to or from ``step-….partial`` publishes or removes a checkpoint in one operation. Runs in one process and needs
no torch; the manager shares the results among the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dalsegno.checkpoint import names
from dalsegno.checkpoint.manifest import Checkpoint, Manifest
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, SaveFailed
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")


def published(directory: Path, after: int = -1, until: int | None = None) -> dict[int, Path]:
    """Published checkpoints by step, the newest first, verified or not: of steps greater than ``after``, up to
    ``until`` (None: all). Raises ConfigurationError for a folder of a step by another name than that step has."""
    found: dict[int, Path] = {}
    for path in _children(directory):
        if (step := names.step_of(path)) is not None and path.is_dir():
            if path.name != (own := names.checkpoint_path(directory, step).name):
                raise ConfigurationError(
                    f"{path}: the folder of step {step} is {own}; rename this one to that, or move it elsewhere"
                )
            found[step] = path
    within = [step for step in found if after < step and (until is None or step <= until)]
    return {step: found[step] for step in sorted(within, reverse=True)}


def partial(directory: Path) -> list[Path]:
    """Saves in progress, and what an interrupted save or deletion left."""
    return [path for path in _children(directory) if names.is_partial(path)]


def quarantined(directory: Path) -> list[Path]:
    return [path for path in _children(directory) if names.quarantined_step_of(path) is not None]


def newest_step(directory: Path) -> int:
    """The greatest step of a published checkpoint, else of a quarantined one; -1 without. A run that has checkpoints
    has left the timeline of those that were quarantined."""
    renamed = [step for path in quarantined(directory) if (step := names.quarantined_step_of(path)) is not None]
    return max(published(directory) or renamed, default=-1)


def expect_none_quarantined(directory: Path) -> None:
    if renamed := sorted(path.name for path in quarantined(directory)):
        raise DamagedCheckpoint(f"{directory}: no checkpoint is left but {', '.join(renamed)}")


def first_valid(
    paths: Iterable[Path], verify: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, dict[Path, DamagedCheckpoint]]:
    """The first of ``paths`` that ``verify`` accepts, None if there is none; and the damaged ones before it, each with
    its error."""
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in paths:
        try:
            return verify(path), damaged
        except DamagedCheckpoint as error:
            damaged[path] = error
    return None, damaged


def publish(manifest: Manifest, partial: Path, final: Path, *, is_whole: bool = True) -> None:
    """Turn ``partial``, which all ranks have written, into the checkpoint ``final``; if the disk does not confirm that,
    back. If it ``is_whole``, a directory that is absent here raises OSError: the ranks have not written to one disk."""
    directories = {(partial / name).parent for name in manifest.files} - {partial}
    for directory in sorted(path for path in directories if is_whole or path.is_dir()):
        filesystem.fsync_directory(directory)
    filesystem.write_durably(partial / names.MANIFEST, manifest.to_bytes())
    filesystem.fsync_directory(partial)
    try:
        filesystem.rename(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):  # raised if the rename did not happen
            filesystem.rename(final, partial)
        raise


def amend(path: Path, metrics: Mapping[str, float], best: bool) -> None:
    """Replace metrics and ``best`` in the manifest of a published checkpoint, atomically."""
    amended = dataclasses.replace(Manifest.read(path), metrics=metrics, best=best)
    beside = names.partial_path(path)
    try:
        filesystem.write_durably(beside, amended.to_bytes())
        filesystem.rename(beside, path / names.MANIFEST)
    except OSError as error:
        with contextlib.suppress(OSError):
            filesystem.remove(beside)
        raise SaveFailed(
            f"{path.name} is valid, but its evaluation could not be written to its manifest: {error}"
        ) from error


def quarantine(path: Path, error: DamagedCheckpoint) -> None:
    """Rename a checkpoint that failed verification, and log why."""
    target = _free_path(path.with_name(path.name + names.DAMAGED))
    logger.warning("a damaged checkpoint is skipped and renamed to %s: %s", target.name, error)
    filesystem.rename(path, target)


def archive(path: Path, into: Path) -> Path:
    """Move a checkpoint to the directory ``into``, which is created if needed, and return its new path."""
    filesystem.make_directory(into)
    target = _free_path(into / path.name)
    filesystem.rename(path, target)
    filesystem.fsync_directory(path.parent)
    return target


def delete(path: Path) -> bool:
    """Delete a checkpoint. One that contains files which its manifest does not name stays, with a warning."""
    own = {path / name for name in Manifest.read(path).files} | {path / names.MANIFEST}
    others = [each for each in path.rglob("*") if each not in own]
    if foreign := [each for each in others if each.is_symlink() or not each.is_dir()]:
        logger.warning("%s is not deleted: it contains %s, which is not part of it", path.name, foreign[0].name)
        return False
    hidden = names.partial_path(path)
    filesystem.rename(path, hidden)
    filesystem.remove(hidden)
    return True


def _free_path(path: Path) -> Path:
    return filesystem.numbered(path.parent, path.name) if path.exists() else path


def _children(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
