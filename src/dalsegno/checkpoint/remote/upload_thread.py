"""Upload thread: sends a run to its URL during one leg."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dalsegno.errors import LeaseLost
from dalsegno.system.byte_sizes import format_bytes
from dalsegno.system.progress import Progress
from dalsegno.system.worker import lower_thread_priority

from .lock import RemoteLock
from .upload import Uploader

logger = logging.getLogger("dalsegno")

PATIENCE = 60.0
"""Seconds without a byte sent after which :meth:`UploadThread.finish` gives up."""

_LONGEST_PAUSE = 60.0  # seconds between two attempts


class UploadThread:
    """Sends what is new each time it is woken, and retries what failed.

    Args:
        uploader: decides what to send.
        lock: nothing is sent once another process has taken it over.
        step: step that the leg resumes from; None if it starts at step 0.
        archived: called on the thread when the store has nothing of an abandoned timeline any more.
    """

    def __init__(self, uploader: Uploader, lock: RemoteLock, step: int | None, archived: Callable[[], None]) -> None:
        self._uploader = uploader
        self._lock = lock
        self._step = step
        self._archived = archived
        self._awake = threading.Event()
        self._awake.set()
        self._is_finishing = self._is_cancelled = self._has_archived = False
        self._failures = 0  # in a row
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="dalsegno-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Send what is new. From any thread."""
        self._awake.set()

    def finish(self) -> None:
        """Wait until everything is sent, as long as bytes move; cancel after that, or on an exception."""
        self._is_finishing = True
        self._progress.advance(0)
        self._awake.set()
        try:
            self._progress.wait(self._join, patience=PATIENCE, report=self._report)
        finally:
            self._is_cancelled = True
            self._awake.set()
        if self._lock.loss() is None and (missing := self._uploader.missing()):
            logger.error(
                "%s: could not be sent: %s; the next leg on this host sends what is in %s",
                self._uploader.url,
                ", ".join(missing),
                self._uploader.run,
            )

    def _join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _report(self) -> None:
        sent = format_bytes(self._progress.bytes)
        logger.warning("waiting for %s: %s sent in this leg", self._uploader.url, sent)

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_thread_priority()
        pause = None
        while True:
            self._awake.wait(pause)
            self._awake.clear()
            if self._is_cancelled:
                return
            is_finishing = self._is_finishing
            try:
                self._send(is_finishing)
            except LeaseLost:  # which ends the run, and is logged where it is renewed
                return
            except Exception as error:  # any exception of a third-party filesystem: training continues
                self._note_failure(error)
                pause = 1.0 if is_finishing else min(_LONGEST_PAUSE, 2.0 ** min(self._failures, 10))
                continue
            pause, self._failures = None, 0
            if is_finishing:
                return

    def _send(self, is_finishing: bool) -> None:
        self._lock.check()
        if not self._has_archived:
            self._uploader.archive_timeline(self._step)
            self._archived()
            self._has_archived = True
        self._uploader.sync(self._advance)
        if is_finishing:
            self._uploader.sync_run_files(self._advance)

    def _advance(self, count: int) -> None:
        if self._is_cancelled:
            raise InterruptedError("the upload was cancelled")
        if loss := self._lock.loss():
            raise LeaseLost(loss)
        self._progress.advance(count)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1 and not self._is_cancelled:
            kind = type(error).__name__
            logger.warning(
                "%s: could not be written to (%s: %s); the upload is retried, and training continues",
                self._uploader.url,
                kind,
                error,
            )
