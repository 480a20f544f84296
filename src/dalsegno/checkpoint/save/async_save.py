"""Flight: one captured save on its way to the disk, beside the training.

Each rank has a thread for it. What they do together::

    every rank says how much it has to write    rank 0: is there room on the disk? make the folder
    every rank writes its files                 at a low priority, so that training is not felt to slow down
    every rank says what it wrote, or why not   rank 0: write the manifest, publish, or throw the folder away
    every rank is told how it ended             so all have the same outcome, and no training thread took part
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.checkpoint.format.manifest import FileRecord, Manifest
from dalsegno.distributed import collectives
from dalsegno.errors import SaveFailed
from dalsegno.system import filesystem
from dalsegno.system.worker import lower_thread_priority

from .resources import format_bytes, free_disk
from .saving import Snapshot, publish

logger = logging.getLogger("dalsegno")

STUCK = 600.0
"""Seconds without a single piece written after which nobody waits for a save any longer."""

_SAY_EVERY = 5.0  # seconds
_GRACE = 2.0  # seconds: for the piece that is just being written when a save is given up

Records = Mapping[str, FileRecord]
Report = tuple[Records, str | None]
"""What a rank has written, and why it did not write all of it."""


class AsyncSave:
    """A save that is under way, or has come to its end.

    Attributes:
        step: finished steps when it was captured.
        path: the checkpoint, once it is published.
        is_best: whether no earlier checkpoint was better.
        failure: why it was not published; None while nobody knows, and if it was.
    """

    def __init__(
        self,
        captured: Snapshot,
        path: Path,
        *,
        step: int,
        is_best: bool,
        manifest_of: Callable[[Sequence[Records]], Manifest],
        published: Callable[[], object],
        afterwards: Callable[[], object],
    ) -> None:
        """Set off. Collective the first time in a process.

        Args:
            captured: what this rank adds.
            path: where the checkpoint shall be.
            manifest_of: makes the manifest of all ranks' records; called on rank 0.
            published: called on rank 0 once it is, before anybody is told.
            afterwards: called on rank 0 when everybody has been told.
        """
        self.step, self.path, self.is_best = step, path, is_best
        self.failure: SaveFailed | None = None
        self._captured = captured
        self._partial = path.with_name(path.name + ".partial")
        self._manifest_of, self._published, self._afterwards = manifest_of, published, afterwards
        self._group = collectives.background_group()
        self._is_rank_zero = collectives.rank() == 0
        self._length, self._written = captured.length, 0
        self._moved = time.monotonic()  # when a piece was written last; for ever in the future once all are
        self._is_given_up = self._is_published = False
        self._landed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dalsegno-save-{step}", daemon=True)
        self._thread.start()
        if not captured.is_copy:
            self.wait()  # what is written are the tensors themselves

    @property
    def done(self) -> bool:
        """Whether this rank knows how it ended."""
        return self._landed.is_set()

    def wait(self) -> None:
        """Wait until it has landed. Every few seconds rank 0 says how far it is. What breaks that off gives it up.

        Raises:
            SaveFailed: if nothing has moved for ten minutes, or soon, if it has been given up before.
        """
        try:
            while not self._landed.wait(_GRACE if self._is_given_up else _SAY_EVERY):
                if self._is_given_up:
                    raise SaveFailed(f"{self.path.name} was given up")
                if self._is_rank_zero:
                    done, length = format_bytes(self._written), format_bytes(self._length)
                    logger.warning("waiting for %s: %s of %s written", self.path.name, done, length)
                if time.monotonic() - self._moved > STUCK:
                    raise SaveFailed(
                        f"{self.path.name}: no byte was written in {STUCK / 60:.0f} minutes; it is given up"
                    )
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Do not go on with it: nothing more is written from the next piece on, and nothing published."""
        self._is_given_up = True

    def join(self) -> None:
        """Wait until its thread is gone, and with it what rank 0 does afterwards."""
        self._thread.join(_GRACE if self._is_given_up else STUCK)

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._captured.is_copy:
                lower_thread_priority()
            reason = self._bring_to_disk()
            failure = None if reason is None else f"{self.path.name} was not saved: {reason}"
        except BaseException as error:  # whatever it is, somebody waits for the end of this
            failure = self._alone_with(error)
        self.failure = None if failure is None else SaveFailed(failure)
        self._landed.set()
        if failure is None and self._is_rank_zero:
            with _only_said(f"after {self.path.name} was saved"):
                self._afterwards()

    def _bring_to_disk(self) -> str | None:
        reason = self._group.gather_decide(self._length, self._make_room)
        return reason or self._group.gather_decide(self._write(), self._finish)

    def _alone_with(self, error: BaseException) -> str | None:
        """What this rank can say when the others cannot be reached any more, as the training is about to find too."""
        if self._is_published:
            return None
        verdict = "was not saved" if self._is_rank_zero else "may not have been saved"
        return f"{self.path.name} {verdict}: the ranks have lost each other ({_described(error)})"

    def _write(self) -> Report:
        try:
            return self._captured.write_to(self._partial, self._advance), None
        except BaseException as error:  # the other ranks wait for what is said here
            return {}, _described(error)
        finally:
            self._moved = float("inf")

    def _advance(self, count: int) -> None:
        if self._is_given_up:
            raise SaveFailed("it was given up")
        self._written += count
        self._moved = time.monotonic()

    # -- what rank 0 decides ----------------------------------------------------------------------------------------

    def _make_room(self, lengths: Sequence[int]) -> str | None:
        try:
            filesystem.remove(self._partial)
            filesystem.make_directory(self._partial.parent)
            filesystem.mkdir_nosync(self._partial)
            needed, free = sum(lengths), free_disk(self._partial)
            if needed <= free:
                return None
            disk = f"the disk of {self._partial.parent}"
            reason = f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free on {disk}"
        except Exception as error:
            reason = _described(error)
        self._throw_away()
        return reason

    def _finish(self, reports: Sequence[Report]) -> str | None:
        reasons = [
            reason if len(reports) == 1 else f"rank {number}: {reason}"
            for number, (_, reason) in enumerate(reports)
            if reason is not None
        ]
        if self._is_given_up and not reasons:
            reasons = ["it was given up"]
        if not reasons:
            try:
                publish(self._manifest_of([records for records, _ in reports]), self._partial, self.path)
                self._is_published = True
            except Exception as error:
                reasons = [_described(error)]
        if reasons:
            self._throw_away()
            return "; ".join(reasons)
        with _only_said(f"when {self.path.name} was saved"):
            self._published()
        return None

    def _throw_away(self) -> None:
        with _only_said(f"{self._partial.name} could not be removed"):
            filesystem.remove(self._partial)


class BufferPrefault:
    """Work that is done a little at a time on a thread of its own, until somebody needs the place."""

    def __init__(self, turns: Iterator[None]) -> None:
        self._turns = turns
        self._is_wanted = True
        self._thread = threading.Thread(target=self._work, name="dalsegno-prepare", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Break it off, and wait for that: the time of one turn."""
        self._is_wanted = False
        self._thread.join()

    def _work(self) -> None:
        lower_thread_priority()
        with _only_said("while memory for checkpoints was prepared"):
            for _ in self._turns:
                if not self._is_wanted:
                    return


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _only_said(where: str) -> Iterator[None]:
    """What fails here is worth a line in the log, and no more than that: the checkpoint does not hang on it."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s: %s", where, type(error).__name__, error)
