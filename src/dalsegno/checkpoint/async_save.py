"""Async saves: write a snapshot to disk on a background thread of each rank, beside training.

The threads of all ranks proceed together::

    each rank sends its number of bytes     rank 0: check the free disk space, create the partial directory
    each rank writes its files              from the first copied piece on; a thread of lower priority hashes them
    each rank sends its file records        rank 0: write the manifest and publish, or remove the partial directory
    each rank receives the outcome          all ranks have the same one, and no training thread took part
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.file_writing import Advance, LinkableFiles
from dalsegno.checkpoint.manifest import Manifest
from dalsegno.checkpoint.snapshot import Snapshot
from dalsegno.distributed import collectives
from dalsegno.errors import SaveFailed
from dalsegno.system import filesystem
from dalsegno.system.machine import free_disk, lower_thread_priority
from dalsegno.system.progress import Progress, format_bytes

logger = logging.getLogger("dalsegno")

STUCK = 600.0
"""Seconds without a byte written after which a wait for a save raises."""

_GRACE = 2.0  # seconds: for the buffer that is being written when a save is cancelled

_HEAD_START = 0.01
"""Seconds at most that the copy waits for the ranks' first exchange and the directory, which take two. The copies of
several ranks keep all processors busy: beside them, each message waits for a turn, and the first write for 20 ms."""

Records = Mapping[str, FileRecord]
Report = tuple[Records, str | None]
"""Files that a rank wrote, and why it did not write all of them."""


class NewDirectory:
    """Where one save writes a checkpoint, and how it is published: a directory on a disk, which the save creates.

    All ranks write to ``partial``, which becomes the checkpoint ``path``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = names.partial_path(path)

    def make_room(self, length: int) -> str | None:
        """On rank 0, prepare ``partial`` for files of ``length`` bytes; why that is not possible, if so."""
        filesystem.remove(self.partial)
        filesystem.make_directory(self.partial.parent)
        filesystem.mkdir_nosync(self.partial)
        free = free_disk(self.partial)
        if length <= free:
            return None
        disk = f"the disk of {self.partial.parent}"
        return f"it takes {format_bytes(length)}, and {format_bytes(free)} are free on {disk}"

    def conclude(self, save: AsyncSave, report: Report) -> str | None:
        """Publish the checkpoint, unless a rank reports a failure; why it was not published. On all ranks."""
        return save.group.gather_decide(report, save.publish)

    def publish(self, manifest: Manifest, advance: Advance) -> None:
        """``advance``: called with the number of bytes that are about to be written besides."""
        checkpoint_dir.publish(manifest, self.partial, self.path)

    def discard(self) -> None:
        """Undo what a save that has failed left."""
        filesystem.remove(self.partial)


class AsyncSave:
    """A save in progress, or a finished one. ``failure``: why it was not published, once that is known. ``records``: of
    the files that this rank wrote; of all files, once they are published in memory."""

    def __init__(
        self,
        snapshot: Snapshot,
        destination: NewDirectory,
        *,
        step: int,
        metrics: Mapping[str, float],
        is_best: bool = False,
        is_finite: bool = True,
        published: Callable[[], object] | None = None,
        afterwards: Callable[[], object] | None = None,
    ) -> None:
        """Start the save, and copy the tensors of the snapshot, or wait for the end where they are not to be copied.
        Collective the first time in a process.

        Args:
            snapshot: this rank's part.
            destination: of the checkpoint.
            published: called on rank 0 after publication, before the ranks receive the outcome.
            afterwards: called on rank 0 after the ranks have received the outcome.
        """
        self.step, self.path, self.is_best = step, destination.path, is_best
        self.failure: SaveFailed | None = None
        self.records: Records = {}
        self._snapshot = snapshot
        self._destination = destination
        self._metrics, self._is_finite = metrics, is_finite
        self._published, self._afterwards = published, afterwards
        self.group = collectives.background_group()
        self._is_rank_zero = collectives.rank() == 0
        self.progress = Progress()
        self.bytes_to_move = snapshot.length
        self._is_cancelled = self.is_published = False
        self._has_begun, self._finished = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dalsegno-save-{step}", daemon=True)
        try:
            self._thread.start()
            if snapshot.copying is not None:
                self._has_begun.wait(_HEAD_START)
                snapshot.copying.run()
            else:
                self.wait()  # the thread reads the live tensors
        except BaseException:
            self.cancel()
            self._finished.wait(_GRACE)  # so that it does not remove the files of the next save of this step
            raise

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def files(self) -> LinkableFiles:
        """Those of :attr:`records`, once it is published."""
        return LinkableFiles(self.path, self.records, digests=self._snapshot.digests)

    def wait(self) -> None:
        """Wait for the outcome. Rank 0 logs the progress every few seconds. Any exception cancels the save: SaveFailed
        if no byte was written for :data:`STUCK` seconds, and after two seconds if the save was cancelled."""
        try:
            if self._is_cancelled:
                if not self._finished.wait(_GRACE):
                    raise SaveFailed(f"{self.path.name} was cancelled")
            elif not self.progress.wait(self._finished.wait, patience=STUCK, report=self._report):
                raise SaveFailed(f"{self.path.name}: no byte was written for {STUCK / 60:.0f} minutes; it is cancelled")
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop writing at the next buffer, and publish nothing."""
        self._is_cancelled = True
        if self._snapshot.copying is not None:
            self._snapshot.copying.abandon(SaveFailed("it was cancelled"))

    def join(self) -> None:
        """Wait for the thread to end, with ``afterwards`` on rank 0."""
        self._thread.join(_GRACE if self._is_cancelled else STUCK)

    def _report(self) -> None:
        if self._is_rank_zero:
            written, total = format_bytes(self.progress.bytes), format_bytes(self.bytes_to_move)
            logger.warning("waiting for %s: %s of %s written", self.path.name, written, total)

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            reason = self.group.gather_decide(self._snapshot.length, self._make_room)
            self._has_begun.set()
            reason = reason or self._destination.conclude(self, self._write())
            failure = None if reason is None else f"{self.path.name} was not saved: {reason}"
        except BaseException as error:  # wait() must end, whatever happened here
            failure = self._outcome_without_ranks(error)
        self.failure = None if failure is None else SaveFailed(failure)
        self._finished.set()
        if failure is None and self._afterwards is not None and self._is_rank_zero:
            if self._snapshot.copying is not None:
                lower_thread_priority()
            with _logged(f"after {self.path.name} was saved"):
                self._afterwards()

    def _outcome_without_ranks(self, error: BaseException) -> str | None:
        """This rank's failure if it lost the connection to the others, which training is about to find out too."""
        if self.is_published:
            return None
        verdict = "was not saved" if self._is_rank_zero else "may not have been saved"
        return f"{self.path.name} {verdict}: the connection between the ranks was lost ({described(error)})"

    def _write(self) -> Report:
        try:
            self.records = self._snapshot.write_to(self._destination.partial, self.advance)
            return self.records, None
        except BaseException as error:  # the other ranks wait for this report
            return {}, described(error)
        finally:
            self.progress.pause()

    def advance(self, count: int) -> None:
        if self._is_cancelled:
            raise SaveFailed("it was cancelled")
        self.progress.advance(count)

    # -- decisions of rank 0 ----------------------------------------------------------------------------------------

    def _make_room(self, lengths: Sequence[int]) -> str | None:
        try:
            reason = self._destination.make_room(sum(lengths))
            if reason is None:
                return None
        except Exception as error:
            reason = described(error)
        self._remove_partial()
        return reason

    def manifest(self, reports: Sequence[Report]) -> Manifest | str:
        """The manifest; or why not to publish."""
        reasons = [
            reason if len(reports) == 1 else f"rank {number}: {reason}"
            for number, (_, reason) in enumerate(reports)
            if reason is not None
        ]
        if reasons or self._is_cancelled:
            return "; ".join(reasons) or "it was cancelled"
        try:
            records = [records for records, _ in reports]
            return self._snapshot.manifest(self.step, self._metrics, self.is_best, self._is_finite, records)
        except Exception as error:
            return described(error)

    def publish(self, reports: Sequence[Report]) -> str | None:
        """Publish, unless a rank reports a failure; why not."""
        manifest = self.manifest(reports)
        if isinstance(manifest, Manifest):
            try:
                self._destination.publish(manifest, self.advance)
                self.is_published = True
            except Exception as error:
                manifest = described(error)
        if isinstance(manifest, str):
            self._remove_partial()
            return manifest
        if self._published is not None:
            with _logged(f"when {self.path.name} was saved"):
                self._published()
        return None

    def _remove_partial(self) -> None:
        with _logged(f"{self._destination.partial.name} could not be removed"):
            self._destination.discard()


class BufferPrefault:
    """Prefaults buffers in small steps on a background thread, until it is stopped."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="dalsegno-prepare", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step, and wait for it: about a millisecond."""
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        lower_thread_priority()
        with _logged("while memory for checkpoints was prepared"):
            for _ in self._steps:
                if self._is_stopping:
                    return


def described(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _logged(where: str) -> Iterator[None]:
    """Log an exception as a warning and continue: the checkpoint is not affected."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s: %s", where, type(error).__name__, error)
