"""The demo's output directory: locked by one demo, and refused if it has files that no demo wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

MARK = "demo.json"
"""Marks the output directory of a demo, whose contents the next demo may replace."""

WRITTEN = ("reference", "killed", "console", "loss.png")


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Create ``out`` if needed, lock it, and delete the runs of an earlier demo.

    Raises:
        ConfigurationError: if it is not a directory, or has files that no demo wrote.
        Locked: if another demo is running there.
    """
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out}: not a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ConfigurationError(f"--out {out}: contains files that no demo wrote; name another directory")
    filesystem.make_directory(out)
    note = {"written by": "dalsegno demo", "the next one replaces": WRITTEN}
    filesystem.replace_durably(out / MARK, (json.dumps(note, indent=2) + "\n").encode())
    with DirectoryLock(out):
        for name in WRITTEN:
            filesystem.remove(out / name)
        yield
