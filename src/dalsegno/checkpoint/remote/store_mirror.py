"""The copy of a run at a URL during a leg: its lock, its thread.

One live process at a time: a file at the URL names it, like the lock in a local directory. The file of a killed process
stays. Where this process would see it (on the same host, in the same pid namespace), it is known to be dead; elsewhere
its lease expires, as in a directory that hosts share.

Training never waits for uploads and never fails because of them: what cannot be sent is retried until the leg ends, and
by the next leg. Only the end of a leg waits, as long as bytes move. Rank 0 sends what all ranks of its host, or of all
hosts that share the directory, have written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dalsegno.checkpoint.remote import download
from dalsegno.checkpoint.remote.store import Store
from dalsegno.checkpoint.remote.upload import Uploader
from dalsegno.distributed import collectives
from dalsegno.errors import LeaseLost
from dalsegno.policies.retention import Keep
from dalsegno.system import filesystem
from dalsegno.system.lease import LOCK, TTL_S, Lease, outlast, read_holder
from dalsegno.system.machine import lower_thread_priority
from dalsegno.system.progress import Progress, format_bytes

logger = logging.getLogger("dalsegno")

PATIENCE = 60.0
"""Seconds without a byte sent after which :meth:`UploadThread.finish` gives up."""

_LONGEST_PAUSE = 60.0  # seconds between two attempts

T = TypeVar("T")


class StoreMirror:
    """As :class:`~dalsegno.checkpoint.remote.Mirror`, of a run with a URL."""

    def __init__(self, url: str, run: Path, keep: Keep | None) -> None:
        self._store = Store(url)
        self._run = run
        self._keep = keep
        self._lease: Lease | None = None  # of rank 0
        self._uploads: UploadThread | None = None

    def claim(self, *, take_over: bool) -> None:
        def take_and_reserve() -> None:
            holder = read_holder(self._store)
            if holder is not None and holder.lives_here():
                raise holder.refuse(self._store.url)
            lease = Lease(self._store, self._store.url)
            lease.acquire(outlast(self._store, self._store.url, holder, take_over=take_over))
            self._lease = lease
            for name in self._store.sizes("rewound"):
                _, archive, *inside = name.split("/")
                if inside and archive.startswith("timeline."):  # so that nothing is archived here under its name
                    filesystem.make_directory(self._run / "rewound" / archive)

        self._on_rank_zero(take_and_reserve)

    def fetch_newer(self, newest_here: int | None, *, strict: bool) -> bool:
        fetch = partial(download.fetch_newer, self._store, self._run, newest_here, strict=strict)
        return self._on_rank_zero(fetch) is not None

    def _on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 before training starts; an error gets a note with the URL."""

        def noted() -> T:
            try:
                return work()
            except Exception as error:
                error.add_note(f"while reading output_dir={self._store.url!r}; nothing was trained")
                raise

        return collectives.from_rank_zero_in_time(noted)

    def begin(self, step: int | None, archived: Callable[[], None] = lambda: None) -> None:
        if self._lease is not None:
            self._uploads = UploadThread(Uploader(self._store, self._run, self._keep), self._lease, step, archived)

    def poll(self) -> None:
        if self._uploads is not None:
            self._uploads.wake()

    def loss(self) -> str | None:
        return None if self._lease is None else self._lease.loss

    def end(self) -> None:
        uploads, self._uploads = self._uploads, None
        try:
            if uploads is not None:
                uploads.finish()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        lease, self._lease = self._lease, None
        try:
            if lease is not None and lease.release():  # unless another process holds the lock by now
                self._store.delete([LOCK])
        except Exception as error:  # any exception of a third-party filesystem
            logger.warning(
                "%s: its lock could not be released (%s: %s); on another host it expires after %.0f s",
                self._store.url,
                type(error).__name__,
                error,
                TTL_S,
            )


class UploadThread:
    """Sends what is new each time it is woken, and retries what failed. ``archived`` is called on the thread when the
    store has nothing any more of a timeline that the leg, which resumes from ``step``, has abandoned."""

    def __init__(self, uploader: Uploader, lease: Lease, step: int | None, archived: Callable[[], None]) -> None:
        self._uploader = uploader
        self._lease = lease
        self._step = step
        self._archived = archived
        self._awake = threading.Event()
        self._awake.set()
        self._is_finishing = self._is_cancelled = self._has_archived = False
        self._failures = 0  # in a row
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="dalsegno-upload", daemon=True)
        self._thread.start()

    def wake(self) -> None:
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
        if self._lease.loss is None and (missing := self._uploader.missing()):
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
        self._lease.confirm()
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
        if self._lease.loss is not None:  # the store, which may not answer, is not asked
            raise LeaseLost(self._lease.loss)
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
