"""The demo's folder: for one demo at a time, and never one that holds anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock

MARK = "demo.json"
"""Lies in the folder of a demo, and says that what is there may be replaced."""

WRITTEN = ("reference", "killed", "console", "loss.png")


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Hold ``out``, which is created where it is missing, without the runs that an earlier demo has left there.

    Raises:
        ConfigurationError: if it holds anything, and no demo wrote it.
        Locked: if another demo is at work there.
    """
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out}: is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise ConfigurationError(f"--out {out}: holds files that no demo wrote; name another folder")
    filesystem.make_directory(out)
    note = {"written by": "dalsegno demo", "the next one replaces": WRITTEN}
    filesystem.replace_durably(out / MARK, (json.dumps(note, indent=2) + "\n").encode())
    with DirectoryLock(out):
        for name in WRITTEN:
            filesystem.remove(out / name)
        yield
