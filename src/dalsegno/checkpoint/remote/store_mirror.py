"""StoreMirror: the copy of a run at a URL.

Training never waits for uploads and never fails because of them: what cannot be sent is retried until the leg ends, and
by the next leg. Only the end of a leg waits, as long as bytes move. Rank 0 sends what all ranks of its host, or of all
hosts that share the directory, have written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dalsegno.distributed import collectives
from dalsegno.policies.retention import Keep
from dalsegno.system.lease import TTL_S

from . import download
from .lock import RemoteLock
from .mirror import Mirror
from .store import Store
from .upload import Uploader
from .upload_thread import UploadThread

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


class StoreMirror(Mirror):
    """Mirrors the run in a directory to a store."""

    def __init__(self, url: str, run: Path, keep: Keep | None) -> None:
        """Raises ConfigurationError if no filesystem for such a URL is installed."""
        self._store = Store(url)
        self._run = run
        self._keep = keep
        self._lock = RemoteLock(self._store)
        self._uploads: UploadThread | None = None

    def claim(self, *, take_over: bool) -> None:
        self._on_rank_zero(lambda: self._lock.take(take_over=take_over))

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
        if collectives.rank() == 0:
            self._uploads = UploadThread(Uploader(self._store, self._run, self._keep), self._lock, step, archived)
            self._uploads.start()

    def poll(self) -> None:
        if self._uploads is not None:
            self._uploads.wake()

    def loss(self) -> str | None:
        return self._lock.loss()

    def end(self) -> None:
        uploads, self._uploads = self._uploads, None
        try:
            if uploads is not None:
                uploads.finish()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        try:
            self._lock.drop()
        except Exception as error:  # any exception of a third-party filesystem
            logger.warning(
                "%s: its lock could not be released (%s: %s); on another host it expires after %.0f s",
                self._store.url,
                type(error).__name__,
                error,
                TTL_S,
            )
