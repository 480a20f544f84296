"""Runs whose ``output_dir`` is a URL: written locally, uploaded in the background, downloaded by a new host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.policies.retention import Keep

if TYPE_CHECKING:
    from dalsegno.checkpoint.remote.store_mirror import StoreMirror


class Mirror:
    """Keeps a copy of a run elsewhere. This class, for a run without a URL, keeps none."""

    def claim(self, *, take_over: bool) -> None:
        """Lock the URL until :meth:`end`; with ``take_over``, even if a process of another host holds the lock. Raises
        Locked if another process holds the lock, or may hold it on another host. Collective."""

    def fetch_newer(self, newest_here: int | None, *, strict: bool) -> bool:
        """Fetch the newest checkpoint from the URL if it is ahead of step ``newest_here`` (None: there is none);
        ``strict``: no older one. Returns whether it was. An OSError is raised: training all the same could fork the
        run. Collective."""
        return False

    def begin(self, step: int | None, archived: Callable[[], None] = lambda: None) -> None:
        """Start the uploads of a leg that resumes from ``step``; None: from nothing. Archives later checkpoints at the
        URL, then calls ``archived``, on another thread of rank 0."""

    def poll(self) -> None:
        """Upload what changed. From any thread; does not wait."""

    def loss(self) -> str | None:
        """Why this process must not train any more: another one has taken over the URL. None if it may."""
        return None

    def end(self) -> None:
        """Wait until everything is sent, as long as bytes move, and unlock the URL. No collective."""


def mirror_of(url: str | None, run: Path, keep: Keep | None) -> Mirror | StoreMirror:
    """Mirror at ``url`` of the run in the directory ``run``; without a URL, one that does nothing. Raises
    ConfigurationError if no filesystem for such a URL is installed."""
    if url is None:
        return Mirror()
    from .store_mirror import StoreMirror  # imports fsspec, for which a run without a URL need not wait

    return StoreMirror(url, run, keep)
