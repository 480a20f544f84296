"""Download: fetch a run that another host continued, or that this host has never had."""

from __future__ import annotations

import contextlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.file_writing import LinkableFiles, UnchangedFile
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.names import CHECKPOINTS, MANIFEST, checkpoint_path, partial_path
from dalsegno.errors import DamagedCheckpoint
from dalsegno.logs.rewind import free_path
from dalsegno.system import filesystem
from dalsegno.system.progress import format_bytes

from .store import Store
from .upload import RUN_FILE, is_run_file, steps_in

logger = logging.getLogger("dalsegno")

_THREADS = 4  # files received at once


def fetch_newer(store: Store, run: Path, newest_here: int | None, *, strict: bool = False) -> int | None:
    """Fetch the newest valid checkpoint of the store, and the logs, if the store is ahead of ``run``, which this
    process has locked: if another host continued the run, as ``run.json`` records, or its checkpoint is newer than
    ``newest_here``. Local files of an abandoned timeline are moved to ``rewound/``; nothing is overwritten or deleted.
    ``strict``: raise if the newest is damaged, instead of fetching the one before. Returns the step; None if the store
    is not ahead."""
    names = store.sizes()
    is_ahead = _is_ahead(store.read(RUN_FILE), run / RUN_FILE)
    for step in steps_in(names):
        if newest_here is not None and step <= newest_here and not is_ahead:
            return None
        try:
            _fetch_checkpoint(store, run, step)
        except DamagedCheckpoint as error:
            if strict:
                raise DamagedCheckpoint(f"{store.url}: the checkpoint of step {step} is damaged: {error}") from error
            logger.warning("%s: the checkpoint of step %d is skipped: %s", store.url, step, error)
            continue
        if is_ahead:
            _archive_timeline(store, run)
        for name in sorted(filter(is_run_file, names), key=RUN_FILE.__eq__):  # run.json last: until then, it is ahead
            _fetch_file(store, run, name, is_ahead)
        return step
    return None


def _is_ahead(there: bytes | None, here: Path) -> bool:
    """Whether the store's ``run.json`` has legs that the local one lacks."""
    try:
        return bool(_legs(there) - _legs(here.read_bytes() if here.exists() else None))
    except (ValueError, TypeError, KeyError):
        return False


def _legs(record: bytes | None) -> set[tuple[Any, ...]]:
    if record is None:
        return set()
    return {(leg["started"], leg["host"], leg["pid"]) for leg in json.loads(record)["legs"]}


def _fetch_checkpoint(store: Store, run: Path, step: int) -> None:
    final = checkpoint_path(run / CHECKPOINTS, step)
    inside = f"{CHECKPOINTS}/{final.name}"
    manifest = store.read(f"{inside}/{MANIFEST}")
    if manifest is not None and final.is_dir() and manifest == _content(final / MANIFEST):
        with contextlib.suppress(DamagedCheckpoint):
            here = Checkpoint.open(final)
            here.verify(here.manifest.files)
            return
    partial = partial_path(final)
    filesystem.remove(partial)
    filesystem.make_directory(partial)
    try:
        filesystem.write_durably(partial / MANIFEST, manifest or b"")
        checkpoint = Checkpoint.open(partial)
        files = checkpoint.manifest.files
        size = format_bytes(sum(each.size for each in files.values()))
        logger.info("fetching %s (%s) from %s", final.name, size, store.url)
        for parent in {(partial / name).parent for name in files}:
            filesystem.make_directory(parent)
        first = {record: name for name, record in reversed([*files.items()])}
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda name: _receive(store, f"{inside}/{name}", partial / name), first.values()):
                pass
        received = LinkableFiles(partial, files)
        for name, record in files.items():
            if first[record] != name:
                UnchangedFile(name, record, partial / first[record], received).write_to(partial, lambda count: None)
        checkpoint.verify(files)
        if final.exists():
            _archive(run, [final], store.url)
        filesystem.rename(partial, final)
    except BaseException:
        filesystem.remove(partial)
        raise


def _receive(store: Store, name: str, target: Path) -> None:
    try:
        store.receive(name, target)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{store.url}/{name}: is missing") from error
    filesystem.fsync_file(target)


def _archive_timeline(store: Store, run: Path) -> None:
    """Archive local checkpoints that the store lacks or has with other content: another host abandoned them."""
    abandoned = []
    for path in checkpoint_dir.published(run / CHECKPOINTS).values():
        there = store.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST}")
        if there is None or there != _content(path / MANIFEST):
            abandoned.append(path)
    _archive(run, abandoned, store.url)


def _archive(run: Path, checkpoints: list[Path], url: str) -> None:
    if not checkpoints:
        return
    place = filesystem.new_archive_dir(run) / CHECKPOINTS
    for path in checkpoints:
        checkpoint_dir.archive(path, place)
    logger.warning("%d checkpoint(s) here differ from those at %s and were moved to %s", len(checkpoints), url, place)


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
        while block := other.read(1 << 20):
            if one.read(len(block)) != block:
                return False
    return True


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
