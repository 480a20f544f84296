"""Upload: make the other side hold what this one does. Nothing here knows of threads, or tries anything twice.

What is to be done is read off the two folders each time. So whatever was missed, because the network failed or the
process was killed, is done the next time, and whatever changes the folder here (saves, prunes, people) is followed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir
from dalsegno.checkpoint.format.manifest import FILE_NAME, Checkpoint, Manifest
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.policies.retention import Entry, Keep, staying

from . import snapshot
from .snapshot import CHECKPOINTS, Marks, Snapshot
from .store import Moved, Store

logger = logging.getLogger("dalsegno")


class Uploader:
    """Sends a run to its store. To be made before the leg writes anything: what is here then belongs to its timeline.

    Args:
        store: where to.
        run: the run's folder here.
        keep: which checkpoints stay, of those that are only there; None: all. What is deleted here is deleted there.
    """

    def __init__(self, store: Store, run: Path, keep: Keep | None) -> None:
        self.url = store.url
        self.run = run
        self.moved: Moved = int
        """Told how many more bytes have been sent."""
        self._store = store
        self._here = run / CHECKPOINTS
        self._keep = keep
        self._there: dict[int, bytes] = {}  # step to manifest
        self._at_first = {step: self._manifest_here(step) for step in self._steps_here()}
        self._rest_at_first = set(snapshot.names_of_rest(run))
        self._were_here = set(self._at_first)
        self._marks: Marks = {}

    def archive_timeline(self, step: int | None) -> None:
        """One timeline: what is there beyond ``step`` (None: everything) is moved to ``rewound/``, unless it was here.

        To be called before anything is sent. What a killed upload has left is removed.
        """
        names = self._store.sizes()
        self._there = self._manifests(names)
        here = self._at_first
        dead = {each for each in self._there if (step is None or each > step) and here.get(each) != self._there[each]}
        moving = [name for each in sorted(dead) for name in _manifest_first(names, each)]
        if step is None:
            moving += [name for name in names if snapshot.is_rest(name) and name not in self._rest_at_first]
        if moving:
            attic = _free_attic(names)
            logger.info("%s: %d files of a timeline that was left go to %s", self._store.url, len(moving), attic)
            for name in moving:
                self._store.move(name, f"{attic}/{name}")
        for each in dead:
            del self._there[each]
        steps = {name: _step_in(name) for name in names if name.startswith(f"{CHECKPOINTS}/") and name not in moving}
        torn = [name for name, its in steps.items() if its is not None and its not in self._there]
        self._store.delete(sorted(torn))

    def sync(self) -> None:
        """Send what is new, the newest checkpoint first, and then delete what is gone."""
        while (path := self._next()) is not None:
            try:
                self._send_checkpoint(path)
            except FileNotFoundError:  # deleted here before all of it could be linked
                if path.exists():
                    raise
        self._delete_pruned()

    def sync_rest(self) -> None:
        """Send whatever belongs to no checkpoint as it is now."""
        self._send_rest(snapshot.of_rest(self.run, self._marks))

    def missing(self) -> list[str]:
        """Names of the checkpoints here that are not there."""
        return [checkpoint_dir.path_of(self._here, step).name for step in self._steps_here() if self._is_missing(step)]

    # -- sending ----------------------------------------------------------------------------------------------------

    def _next(self) -> Path | None:
        return next(
            (checkpoint_dir.path_of(self._here, step) for step in self._steps_here() if self._is_missing(step)), None
        )

    def _send_checkpoint(self, path: Path) -> None:
        checkpoint = checkpoint_dir.opened(path)
        step = checkpoint.step
        manifest = (path / FILE_NAME).read_bytes()
        if step >= max(self._there, default=0):
            self._send_rest(snapshot.of_rest(self.run, self._marks, checkpoint))
        taken = snapshot.of_checkpoint(self.run, checkpoint)
        if step in self._there and _same_files(self._there[step], manifest):  # only what it says of itself is new
            name = f"{CHECKPOINTS}/{path.name}/{FILE_NAME}"
            taken = Snapshot({name: taken.files[name]})
        elif step in self._there:
            self._delete(step)
        self._send(taken)
        self._there[step] = manifest
        self._were_here.add(step)

    def _send_rest(self, taken: Snapshot) -> None:
        self._send(taken)
        self._marks |= taken.marks

    def _send(self, taken: Snapshot) -> None:
        for name, path in taken.files.items():
            self._store.send(path, name, self.moved)
        snapshot.discard(self.run)

    # -- deleting ---------------------------------------------------------------------------------------------------

    def _delete_pruned(self) -> None:
        here = set(self._steps_here())
        gone = (self._were_here - here) & self._there.keys()
        if self._keep is not None:
            entries = [entry for step in sorted(self._there) if (entry := _entry(self._there[step]))]
            kept = staying(self._keep, entries)
            gone |= self._there.keys() - here - self._were_here - kept
        newest = max(self._there, default=None)
        for step in sorted(gone - {newest}):
            self._delete(step)

    def _delete(self, step: int) -> None:
        """The manifest goes first: what is left of it at any moment is no checkpoint."""
        self._store.delete(_manifest_first(self._store.sizes(_folder_of(step)), step))
        del self._there[step]

    # -- looking ----------------------------------------------------------------------------------------------------

    def _steps_here(self) -> list[int]:
        """Newest first."""
        return [
            step
            for path in checkpoint_dir.newest_first(self._here)
            if (step := checkpoint_dir.step_of(path)) is not None
        ]

    def _is_missing(self, step: int) -> bool:
        return self._there.get(step) != self._manifest_here(step)

    def _manifest_here(self, step: int) -> bytes | None:
        """None if it is gone, or damaged: then it is not sent."""
        path = checkpoint_dir.path_of(self._here, step)
        try:
            Checkpoint.open(path)
            return (path / FILE_NAME).read_bytes()
        except (OSError, StateMismatch):
            return self._there.get(step)

    def _manifests(self, names: dict[str, int]) -> dict[int, bytes]:
        found = {}
        for name in names:
            if name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{FILE_NAME}"):
                step, content = _step_in(name), self._store.read(name)
                if step is not None and content is not None:
                    found[step] = content
        return found


def steps_in(names: dict[str, int]) -> list[int]:
    """The steps of the checkpoints among a store's files, newest first."""
    found = {_step_in(name) for name in names if name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{FILE_NAME}")}
    return sorted((step for step in found if step is not None), reverse=True)


def _free_attic(names: dict[str, int]) -> str:
    """A place that no timeline left here will be sent to."""
    number = 1
    while any(name.startswith(f"rewound/elsewhere.{number:04d}/") for name in names):
        number += 1
    return f"rewound/elsewhere.{number:04d}"


def _step_in(name: str) -> int | None:
    parts = name.split("/")
    return checkpoint_dir.step_of(Path(parts[1])) if len(parts) > 2 else None


def _folder_of(step: int) -> str:
    return f"{CHECKPOINTS}/{checkpoint_dir.path_of(Path(), step).name}"


def _manifest_first(names: dict[str, int], step: int) -> list[str]:
    inside = [name for name in names if name.startswith(f"{_folder_of(step)}/")]
    return sorted(inside, key=lambda name: (not name.endswith(f"/{FILE_NAME}"), name))


def _same_files(one: bytes, other: bytes) -> bool:
    first, second = _parsed(one), _parsed(other)
    return first is not None and second is not None and first.files == second.files


def _entry(manifest: bytes) -> Entry | None:
    its = _parsed(manifest)
    return None if its is None else Entry(its.step, its.metrics, its.best, its.finite)


def _parsed(manifest: bytes) -> Manifest | None:
    """None if it is damaged, or of a newer format: then nothing can be said of it."""
    try:
        return Manifest.parse(manifest, Path(FILE_NAME))
    except (DamagedCheckpoint, StateMismatch):
        return None
