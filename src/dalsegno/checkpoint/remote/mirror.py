"""Mirror: a copy of the run at a URL, kept up to date in the background, and fetched by a new host.

Training never waits for uploads and never fails because of them: what cannot be sent is retried until the leg ends, and
by the next leg. Only the end of a leg waits, as long as bytes move. Rank 0 sends what all ranks of its host, or of all
hosts that share the directory, have written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dalsegno.distributed import collectives
from dalsegno.policies.retention import Keep
from dalsegno.system.lease import TTL_S

from . import download
from .lock import RemoteLock
from .store import Store
from .upload import Uploader
from .upload_thread import UploadThread

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


class Mirror(Protocol):
    """Keeps a copy of a run elsewhere."""

    def claim(self, *, take_over: bool) -> None:
        """Lock the URL until :meth:`end`, so that no other process trains there. Collective.

        Args:
            take_over: take the lock from a process of another host.

        Raises:
            Locked: if another process holds the lock, or may hold it on another host.
            OSError: if the lock cannot be read.
        """
        ...

    def fetch_newer(self, newest_here: int | None) -> bool:
        """Fetch the newest checkpoint from the URL if it is ahead of step ``newest_here``. Collective.

        Returns:
            Whether a newer checkpoint was fetched.

        Raises:
            OSError: if the URL cannot be read. Training all the same could fork the run.
        """
        ...

    def begin(self, step: int | None) -> None:
        """Start the uploads of a leg that resumes from ``step``; None: from nothing. Archives later checkpoints."""
        ...

    def poll(self) -> None:
        """Upload what changed. From any thread; does not wait."""
        ...

    def loss(self) -> str | None:
        """Why this process must not train any more: another one has taken over the URL. None if it may."""
        ...

    def end(self) -> None:
        """Wait until everything is sent, as long as bytes move, and unlock the URL. No collective."""
        ...


class NoMirror:
    """Used if ``output_dir`` is not a URL."""

    def claim(self, *, take_over: bool) -> None: ...

    def fetch_newer(self, newest_here: int | None) -> bool:
        return False

    def begin(self, step: int | None) -> None: ...

    def poll(self) -> None: ...

    def loss(self) -> str | None:
        return None

    def end(self) -> None: ...


def mirror_of(url: str | None, run: Path, keep: Keep | None) -> Mirror:
    """Mirror at ``url`` of the run in the directory ``run``; without a URL, one that does nothing.

    Raises:
        ConfigurationError: if no filesystem for such a URL is installed.
    """
    return NoMirror() if url is None else StoreMirror(Store(url), run, keep)


class StoreMirror:
    """Mirrors a run to a store."""

    def __init__(self, store: Store, run: Path, keep: Keep | None) -> None:
        self._store = store
        self._run = run
        self._keep = keep
        self._lock = RemoteLock(store)
        self._uploads: UploadThread | None = None

    def claim(self, *, take_over: bool) -> None:
        self._on_rank_zero(lambda: self._lock.take(take_over=take_over))

    def fetch_newer(self, newest_here: int | None) -> bool:
        return self._on_rank_zero(lambda: download.fetch_newer(self._store, self._run, newest_here) is not None)

    def _on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 before training starts; an error gets a note with the URL."""

        def noted() -> T:
            try:
                return work()
            except Exception as error:
                error.add_note(f"while reading output_dir={self._store.url!r}; nothing was trained")
                raise

        return collectives.from_rank_zero_in_time(noted)

    def begin(self, step: int | None) -> None:
        if collectives.rank() == 0:
            self._uploads = UploadThread(Uploader(self._store, self._run, self._keep), self._lock, step)
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
