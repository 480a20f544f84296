"""Runs whose ``output_dir`` is a URL: written locally, uploaded in the background, downloaded by a new host."""

from __future__ import annotations

from pathlib import Path

from dalsegno.policies.retention import Keep

from .mirror import Mirror


def mirror_of(url: str | None, run: Path, keep: Keep | None) -> Mirror:
    """Mirror at ``url`` of the run in the directory ``run``; without a URL, one that does nothing. Raises
    ConfigurationError if no filesystem for such a URL is installed."""
    if url is None:
        return Mirror()
    from .store_mirror import StoreMirror  # imports fsspec, for which a run without a URL need not wait

    return StoreMirror(url, run, keep)
