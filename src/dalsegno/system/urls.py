"""Where a run lies: a folder here; or a URL elsewhere, with a folder here into which everything is written first."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def is_url(place: str | Path) -> bool:
    """Whether ``place`` is something like ``s3://bucket/run``. A path never is: it has lost a slash."""
    return isinstance(place, str) and _URL.match(place) is not None


def is_mangled_url(place: str | Path) -> bool:
    """Whether ``place`` is a path that was a URL, and has lost a slash on its way."""
    return not is_url(place) and _URL.match(str(place).replace(":/", "://", 1)) is not None


def cache_dir(url: str) -> Path:
    """The folder here for a run at ``url``: always the same one, below ``$DALSEGNO_CACHE`` or ``~/.cache/dalsegno``."""
    cache = Path(os.environ.get("DALSEGNO_CACHE") or "~/.cache/dalsegno").expanduser()
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.partition("://")[2]).strip("-.") or "run"
    return cache / f"{name[-80:]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
