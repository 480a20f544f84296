"""Download: what a host finds of a run that another one has gone on with, or that it has never seen."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.format.manifest import FILE_NAME, Checkpoint
from dalsegno.errors import DamagedCheckpoint
from dalsegno.logs.archive import free_path
from dalsegno.system import archive, filesystem

from .snapshot import CHECKPOINTS, is_rest
from .store import Store
from .upload import steps_in

logger = logging.getLogger("dalsegno")

_AT_ONCE = 4  # files


def fetch_newer(store: Store, run: Path, newest_here: int | None) -> int | None:
    """Put the newest whole checkpoint of the store, and the logs beside it, into ``run``, if it has come further.

    It has if another host has gone on with the run, which ``run.json`` tells, or if its checkpoint is newer. What is
    here of a timeline that was left goes to ``rewound/``; nothing is overwritten or deleted.

    Args:
        store: where from.
        run: the run's folder here, which this process holds.
        newest_here: the step of the newest verified checkpoint here; None if there is none.

    Returns:
        Its step; None if there is nothing newer.
    """
    names = store.sizes()
    is_ahead = _is_ahead(store.read("run.json"), run / "run.json")
    for step in steps_in(names):
        if newest_here is not None and step <= newest_here and not is_ahead:
            return None
        try:
            _fetch_checkpoint(store, run, step)
        except DamagedCheckpoint as error:
            logger.warning("%s: the checkpoint of step %d is skipped: %s", store.url, step, error)
            continue
        if is_ahead:
            _archive_timeline(store, run, step)
        for name in names:
            if is_rest(name):
                _fetch_file(store, run, name, is_ahead)
        return step
    return None


def _is_ahead(there: bytes | None, here: Path) -> bool:
    """Whether the run has legs there that are not known here."""
    try:
        return bool(_legs(there) - _legs(here.read_bytes() if here.exists() else None))
    except (ValueError, TypeError, KeyError):
        return False


def _legs(record: bytes | None) -> set[tuple[Any, ...]]:
    if record is None:
        return set()
    return {(leg["started"], leg["host"], leg["pid"]) for leg in json.loads(record)["legs"]}


def _fetch_checkpoint(store: Store, run: Path, step: int) -> None:
    """
    Raises:
        DamagedCheckpoint: if what is there is not what its manifest says.
    """
    final = checkpoint_dir.path_of(run / CHECKPOINTS, step)
    inside = f"{CHECKPOINTS}/{final.name}"
    manifest = store.read(f"{inside}/{FILE_NAME}")
    if manifest is not None and final.is_dir() and manifest == _content(final / FILE_NAME):
        with contextlib.suppress(DamagedCheckpoint):
            here = Checkpoint.open(final)
            here.verify(here.manifest.files)
            return
    partial = final.with_name(final.name + checkpoint_dir.PARTIAL)
    filesystem.remove(partial)
    filesystem.make_directory(partial)
    try:
        filesystem.write_durably(partial / FILE_NAME, manifest or b"")
        checkpoint = Checkpoint.open(partial)
        size = sum(each.size for each in checkpoint.manifest.files.values())
        logger.info("bringing %s (%.3g GB) from %s", final.name, size / 1e9, store.url)
        for parent in {(partial / name).parent for name in checkpoint.manifest.files}:
            filesystem.make_directory(parent)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = checkpoint.manifest.files
            for _ in pool.map(lambda name: _receive(store, f"{inside}/{name}", partial / name), names):
                pass
        checkpoint.verify(checkpoint.manifest.files)
        if final.exists():
            _set_behind(run, [final], store.url)
        filesystem.rename(partial, final)
    except BaseException:
        filesystem.remove(partial)
        raise


def _receive(store: Store, name: str, target: Path) -> None:
    """
    Raises:
        DamagedCheckpoint: if there is no such file.
    """
    try:
        store.receive(name, target)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{store.url}/{name}: is missing") from error
    descriptor = os.open(target, os.O_RDONLY)
    try:
        filesystem.fsync(descriptor, target)
    finally:
        os.close(descriptor)


def _archive_timeline(store: Store, run: Path, step: int) -> None:
    """What is here, but not there, or not the same there, is of a timeline that another host has left."""
    dead = []
    for path in checkpoint_dir.newest_first(run / CHECKPOINTS):
        there = store.read(f"{CHECKPOINTS}/{path.name}/{FILE_NAME}")
        if there is None or there != _content(path / FILE_NAME):
            dead.append(path)
    _set_behind(run, dead, store.url)


def _set_behind(run: Path, dead: list[Path], url: str) -> None:
    if not dead:
        return
    place = archive.new_archive_dir(run) / CHECKPOINTS
    filesystem.make_directory(place)
    for path in dead:
        filesystem.rename(path, place / path.name)
    filesystem.fsync_directory(run / CHECKPOINTS)
    logger.warning("%d checkpoint(s) here are not those at %s, and are now in %s", len(dead), url, place)


def _fetch_file(store: Store, run: Path, name: str, is_ahead: bool) -> None:
    target = run / name
    if target.exists() and not is_ahead:
        return
    filesystem.make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        _receive(store, name, temporary)
        if target.exists() and not _begins_with(temporary, target):
            filesystem.rename(target, free_path(target.parent, target.name))
        filesystem.rename(temporary, target)
    finally:
        filesystem.remove(temporary)


def _begins_with(longer: Path, shorter: Path) -> bool:
    size = shorter.stat().st_size
    if size > longer.stat().st_size:
        return False
    with longer.open("rb") as one, shorter.open("rb") as other:
        while piece := other.read(1 << 20):
            if one.read(len(piece)) != piece:
                return False
    return True


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
