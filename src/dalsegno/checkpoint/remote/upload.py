"""Upload: make the store contain what the run's directory contains. No threads and no retries here.

Each sync compares the two sides. So it makes up for what was missed, because the network failed or the process was
killed, and follows every change of the directory: saves, deletions, manual edits. It sends a checkpoint's files, or the
logs as they were at its save and the files that identify the run. They are staged in ``.uploading`` in the run's
directory until they have been sent: hard links to the checkpoint's files, which may be deleted meanwhile, and copies of
files that are still being written.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.json_view import readable_states
from dalsegno.checkpoint.manifest import Checkpoint, Manifest
from dalsegno.checkpoint.names import CHECKPOINTS, MANIFEST, checkpoint_path, step_of
from dalsegno.control.inbox import INBOX
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.logs import RunFile
from dalsegno.logs.rewind import Position
from dalsegno.policies.retention import Keep, steps_to_keep
from dalsegno.system import filesystem
from dalsegno.witness import WITNESS

from .store import Moved, Store

logger = logging.getLogger("dalsegno")

STAGING = ".uploading"
RUN_FILE = "run.json"

Marks = dict[str, tuple[int, int, int]]
"""By name in the run: bytes of the file that were sent, its modification time (ns), and its inode, since a file may be
replaced within the resolution of the clock."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Uploader:
    """Sends a run to its store. Create it before the leg writes: existing files then count as this leg's timeline.
    ``keep``: policy for checkpoints that only the store has. What is deleted here is deleted there."""

    def __init__(self, store: Store, run: Path, keep: Keep | None) -> None:
        self.url = store.url
        self.run = run
        self._store = store
        self._here = run / CHECKPOINTS
        self._keep = keep
        self._there: dict[int, bytes] = {}  # step to manifest
        self._at_first = {step: self._manifest_here(step) for step in self._steps_here()}
        self._run_files_at_first = set(run_files(run))
        self._were_here = set(self._at_first)
        self._marks: Marks = {}

    def archive_timeline(self, step: int | None) -> None:
        """Before anything is sent, move what the store has beyond ``step`` (None: everything) to ``rewound/``, unless
        this host had it too; and remove what a killed upload left."""
        names = self._store.sizes()
        contents = {each: self._store.read(name) for name, each in _manifests_among(names).items()}
        self._there = {each: content for each, content in contents.items() if content is not None}
        here = self._at_first
        abandoned = {
            each for each in self._there if (step is None or each > step) and here.get(each) != self._there[each]
        }
        moving = [name for each in sorted(abandoned) for name in _manifest_first(names, each)]
        if step is None:
            of_runs = [name for name in names if is_run_file(name) and not name.startswith("rewound/")]
            moving += [name for name in of_runs if name not in self._run_files_at_first]
        if moving:
            archive = _free_archive(names)
            logger.info("%s: %d files of an abandoned timeline are moved to %s", self._store.url, len(moving), archive)
            for name in moving:
                self._store.move(name, f"{archive}/{name}")
        for each in abandoned:
            del self._there[each]
        steps = {name: _step_in(name) for name in names if name.startswith(f"{CHECKPOINTS}/") and name not in moving}
        torn = [name for name, its in steps.items() if its is not None and its not in self._there]
        self._store.delete(sorted(torn))

    def sync(self, moved: Moved | None = None) -> None:
        """Send new checkpoints, the newest first, then delete those that were deleted here."""
        while (path := next(self._missing(), None)) is not None:
            try:
                self._send_checkpoint(path, moved)
            except FileNotFoundError:  # deleted here before all of its files were linked
                if path.exists():
                    raise
        self._delete_pruned()

    def sync_run_files(self, moved: Moved | None = None, checkpoint: Checkpoint | None = None) -> None:
        """Send the files that belong to no checkpoint, as they are now, or were when ``checkpoint`` was saved."""
        files, marks = changed_run_files(self.run, self._marks, checkpoint)
        self._send(files, moved)
        self._marks |= marks

    def missing(self) -> list[str]:
        return [path.name for path in self._missing()]

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send_checkpoint(self, path: Path, moved: Moved | None) -> None:
        checkpoint = Checkpoint.open(path)
        step = checkpoint.step
        manifest = (path / MANIFEST).read_bytes()
        if step >= max(self._there, default=0):
            self.sync_run_files(moved, checkpoint)
        staging, names = _fresh(self.run), [*checkpoint.manifest.files, MANIFEST]
        files = {f"{_prefix_of(step)}{name}": _linked(path / name, staging / name) for name in names}
        if step in self._there and _same_files(self._there[step], manifest):  # only the manifest was amended
            name = f"{_prefix_of(step)}{MANIFEST}"
            files = {name: files[name]}
        elif step in self._there:
            self._delete(step)
        self._send(files, moved, self._unchanged(checkpoint.manifest, step))
        self._there[step] = manifest
        self._were_here.add(step)

    def _send(self, files: Mapping[str, Path], moved: Moved | None, unchanged: Mapping[str, str] = _NOTHING) -> None:
        """``files``: by name in the run, in order; ``unchanged``: whose content the store has, with its name there."""
        for name, path in files.items():
            if name not in unchanged or not self._store.copy(unchanged[name], name):
                self._store.send(path, name, moved)
        discard_staged(self.run)

    def _unchanged(self, manifest: Manifest, step: int) -> dict[str, str]:
        """Files of the checkpoint with the name of the same content in the store by then: in its newest checkpoint, or
        among the files of this one that are sent before."""
        names = {}
        if (newest := max(self._there, default=None)) is not None and (former := _parsed(self._there[newest])):
            names = {record: f"{_prefix_of(newest)}{name}" for name, record in former.files.items()}
        unchanged = {}
        for name, record in manifest.files.items():
            there = names.setdefault(record, own := f"{_prefix_of(step)}{name}")
            if there != own:
                unchanged[own] = there
        return unchanged

    # -- deleting ---------------------------------------------------------------------------------------------------

    def _delete_pruned(self) -> None:
        here = set(self._steps_here())
        gone = (self._were_here - here) & self._there.keys()
        if self._keep is not None:
            manifests = [_parsed(self._there[step]) for step in sorted(self._there)]
            kept = steps_to_keep(self._keep, [manifest.summary for manifest in manifests if manifest is not None])
            gone |= self._there.keys() - here - self._were_here - kept
        newest = max(self._there, default=None)
        for step in sorted(gone - {newest}):
            self._delete(step)

    def _delete(self, step: int) -> None:
        """Deletes the manifest first: a checkpoint is never valid with files missing."""
        self._store.delete(_manifest_first(self._store.sizes(_prefix_of(step).rstrip("/")), step))
        del self._there[step]

    # -- comparing --------------------------------------------------------------------------------------------------

    def _steps_here(self) -> list[int]:
        return [*checkpoint_dir.published(self._here)]

    def _missing(self) -> Iterator[Path]:
        """Checkpoints here that the store lacks, or has with another manifest; newest first."""
        for step in self._steps_here():
            if self._there.get(step) != self._manifest_here(step):
                yield checkpoint_path(self._here, step)

    def _manifest_here(self, step: int) -> bytes | None:
        """The store's manifest if the checkpoint here is missing or damaged: then it is not sent."""
        path = checkpoint_path(self._here, step)
        try:
            Checkpoint.open(path)
            return (path / MANIFEST).read_bytes()
        except (OSError, StateMismatch):
            return self._there.get(step)


def steps_in(names: dict[str, int]) -> list[int]:
    return sorted(set(_manifests_among(names).values()), reverse=True)


def _manifests_among(names: dict[str, int]) -> dict[str, int]:
    steps = {
        name: _step_in(name) for name in names if name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{MANIFEST}")
    }
    return {name: step for name, step in steps.items() if step is not None}


def _free_archive(names: dict[str, int]) -> str:
    """An archive in the store that no other host's abandoned timeline is in."""
    number = 1
    while any(name.startswith(f"rewound/elsewhere.{number:04d}/") for name in names):
        number += 1
    return f"rewound/elsewhere.{number:04d}"


def _step_in(name: str) -> int | None:
    parts = name.split("/")
    return step_of(Path(parts[1])) if len(parts) > 2 else None


def _prefix_of(step: int) -> str:
    return f"{CHECKPOINTS}/{checkpoint_path(Path(), step).name}/"


def _manifest_first(names: dict[str, int], step: int) -> list[str]:
    inside = [name for name in names if name.startswith(_prefix_of(step))]
    return sorted(inside, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name))


def _same_files(one: bytes, other: bytes) -> bool:
    first, second = _parsed(one), _parsed(other)
    return first is not None and second is not None and first.files == second.files


def _parsed(manifest: bytes) -> Manifest | None:
    """None if the manifest is damaged or of a newer format."""
    try:
        return Manifest.parse(manifest, Path(MANIFEST))
    except (DamagedCheckpoint, StateMismatch):
        return None


def changed_run_files(run: Path, known: Marks, checkpoint: Checkpoint | None = None) -> tuple[dict[str, Path], Marks]:
    """Files that belong to no checkpoint and differ from ``known``: logs, ``run.json``, files that callbacks wrote; and
    the marks of these. With a ``checkpoint``, logs are cut at their length when it was saved, and ``run.json`` lacks
    the end of its newest leg, since the last records do; without, they are as now, ``run.json`` last."""
    lengths: Mapping[str, int] = {}
    if checkpoint is not None:
        states = [*readable_states(checkpoint).values()]
        lengths = {position.path: position.offset for position in _positions_in(states)}
    staging, files, marks = _fresh(run) / "rest", dict[str, Path](), Marks()
    for name in sorted(run_files(run), key=RUN_FILE.__eq__):
        try:
            status = (run / name).stat()
            mark = (min(status.st_size, lengths.get(name, status.st_size)), status.st_mtime_ns, status.st_ino)
            if known.get(name) == mark:
                continue
            files[name] = _copied(run / name, staging / name, mark[0])
            if name == RUN_FILE and checkpoint is not None and RunFile(staging).withdraw_end():
                continue  # without a mark: the next time it has the end
            marks[name] = mark
        except FileNotFoundError:  # moved meanwhile; it is sent the next time
            continue
    return files, marks


def run_files(run: Path) -> list[str]:
    return sorted(_run_files(run, run)) if run.is_dir() else []


def discard_staged(run: Path) -> None:
    filesystem.remove(run / STAGING)


def is_run_file(name: str) -> bool:
    """Whether a file, here or at the URL, belongs neither to a checkpoint nor to the inbox of commands or the witness
    of a process on one host; if it is a directory, whether such files may be in it. A hostile name could lead out of
    the run's directory: no part of a name begins with a dot or is empty."""
    first, *_ = parts = name.split("/")
    return first not in (INBOX, WITNESS) and not any(
        not part or part.startswith(".") or part == CHECKPOINTS for part in parts
    )


def _fresh(run: Path) -> Path:
    discard_staged(run)
    filesystem.make_directory(run / STAGING)
    return run / STAGING


def _run_files(run: Path, directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        name = path.relative_to(run).as_posix()
        if path.is_symlink() or not is_run_file(name):
            continue
        if path.is_dir():
            yield from _run_files(run, path)
        elif path.is_file():
            yield name


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
