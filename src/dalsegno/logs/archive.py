"""Archive of log bytes: copies them into ``rewound/`` and fsyncs them before a log is truncated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dalsegno.system import filesystem

COPY_BYTES = 1 << 20


def free_path(directory: Path, name: str) -> Path:
    """Return an unused path in ``directory/rewound``, creating that folder."""
    rewound = directory / "rewound"
    filesystem.make_directory(rewound)
    return filesystem.numbered(rewound, name)


def archive_file(path: Path, target: Path) -> None:
    """Move a file into the archive."""
    filesystem.rename(path, target)
    filesystem.fsync_directory(path.parent)


def archive_tail(descriptor: int, offset: int, target: Path) -> None:
    """Copy what follows ``offset`` in an open file. After a kill ``target`` contains all of it, or does not exist."""
    filesystem.replace_durably_in_pieces(target, _pieces(descriptor, offset))


def _pieces(descriptor: int, offset: int) -> Iterator[bytes]:
    while piece := os.pread(descriptor, COPY_BYTES, offset):
        yield piece
        offset += len(piece)
