"""Mirror: keeps what lies at a URL like what lies here, and brings it back to a host that has never seen it.

Training never waits for it, and never fails by it: what cannot be sent is tried again until the leg ends, and by the
next leg. Only leaving waits, as long as something moves. On one host, and where hosts share the folder, rank 0 sends
what all have written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dalsegno.distributed import collectives
from dalsegno.policies.retention import Keep

from . import download
from .lock import RemoteLock
from .store import Store
from .upload import Uploader
from .upload_thread import UploadThread

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


class Mirror(Protocol):
    """What a run tells whoever keeps a copy of it elsewhere."""

    def claim(self, *, take_over: bool) -> None:
        """From now on, until :meth:`end`, no other process is to train there. Collective.

        Args:
            take_over: what a process of another host has left there does not count.

        Raises:
            Locked: if another one does, or may do so on another host.
            OSError: if nobody can tell.
        """
        ...

    def fetch_newer(self, newest_here: int | None) -> bool:
        """Bring the newest checkpoint from there, if it has come further than that of step ``newest_here``. Collective.

        Returns:
            Whether there is a newer one here now.

        Raises:
            OSError: if nobody can tell: a leg that began all the same could be the run's second one at a time.
        """
        ...

    def begin(self, step: int | None) -> None:
        """A leg goes on from ``step``; None: from nothing. What lies beyond is of a timeline that was left."""
        ...

    def poll(self) -> None:
        """Something has changed here. From any thread."""
        ...

    def end(self) -> None:
        """The leg ends: wait until all is there, as long as something moves, and let go. No collective."""
        ...


class NoMirror:
    """Nobody keeps a copy."""

    def claim(self, *, take_over: bool) -> None: ...

    def fetch_newer(self, newest_here: int | None) -> bool:
        return False

    def begin(self, step: int | None) -> None: ...

    def poll(self) -> None: ...

    def end(self) -> None: ...


def mirror_of(url: str | None, run: Path, keep: Keep | None) -> Mirror:
    """The mirror at ``url`` of the run in the folder ``run``; without a URL, one that does nothing.

    Raises:
        ConfigurationError: if nothing is installed for such a URL.
    """
    return NoMirror() if url is None else StoreMirror(Store(url), run, keep)


class StoreMirror:
    """Sends a run to a store."""

    def __init__(self, store: Store, run: Path, keep: Keep | None) -> None:
        self._store = store
        self._run = run
        self._keep = keep
        self._claim = RemoteLock(store)
        self._courier: UploadThread | None = None

    def claim(self, *, take_over: bool) -> None:
        self._look_at(lambda: self._claim.take(take_over=take_over))

    def fetch_newer(self, newest_here: int | None) -> bool:
        return self._look_at(lambda: download.fetch_newer(self._store, self._run, newest_here) is not None)

    def _look_at(self, work: Callable[[], T]) -> T:
        """``work`` on rank 0, before anything is trained."""

        def noted() -> T:
            try:
                return work()
            except Exception as error:
                error.add_note(f"while output_dir={self._store.url!r} was looked at; nothing was trained")
                raise

        return collectives.from_rank_zero_in_time(noted)

    def begin(self, step: int | None) -> None:
        if collectives.rank() == 0:
            self._courier = UploadThread(Uploader(self._store, self._run, self._keep), self._claim, step)
            self._courier.start()

    def poll(self) -> None:
        if self._courier is not None:
            self._courier.wake()

    def end(self) -> None:
        courier, self._courier = self._courier, None
        try:
            if courier is not None:
                courier.finish()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        try:
            self._claim.drop()
        except Exception as error:  # whatever a filesystem of others raises
            logger.warning(
                "%s: its lock could not be given back (%s: %s); from another host, take_over_lock=True is needed",
                self._store.url,
                type(error).__name__,
                error,
            )
