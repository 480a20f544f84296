"""Location of a run: a local folder, or a URL with a local cache folder to which everything is written first."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def is_url(place: str | Path) -> bool:
    """Whether ``place`` is a URL such as ``s3://bucket/run``. A Path never is one: it has lost a slash."""
    return isinstance(place, str) and _URL.match(place) is not None


def is_mangled_url(place: str | Path) -> bool:
    """Whether ``place`` is a URL that became a path and lost a slash."""
    return not is_url(place) and _URL.match(str(place).replace(":/", "://", 1)) is not None


def cache_dir(url: str) -> Path:
    """Return the local folder for a run at ``url``: a fixed one below ``$DALSEGNO_CACHE`` or ``~/.cache/dalsegno``."""
    cache = Path(os.environ.get("DALSEGNO_CACHE") or "~/.cache/dalsegno").expanduser()
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.partition("://")[2]).strip("-.") or "run"
    return cache / f"{name[-80:]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
