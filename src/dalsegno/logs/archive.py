"""Where bytes go that a log shall no longer hold: into ``rewound/``, and to the disk, before anything is cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dalsegno.system import filesystem

COPY_BYTES = 1 << 20


def free_place(directory: Path, name: str) -> Path:
    """A path that nothing has yet, in ``directory/rewound``, which is made."""
    rewound = directory / "rewound"
    filesystem.make_directory(rewound)
    return filesystem.numbered(rewound, name)


def archive_whole(path: Path, target: Path) -> None:
    """Move the file."""
    filesystem.rename(path, target)
    filesystem.fsync_directory(path.parent)


def archive_tail(descriptor: int, offset: int, target: Path) -> None:
    """Copy what follows ``offset`` in an open file. A kill leaves all of it in ``target``, or nothing."""
    filesystem.replace_durably_in_pieces(target, _pieces(descriptor, offset))


def _pieces(descriptor: int, offset: int) -> Iterator[bytes]:
    while piece := os.pread(descriptor, COPY_BYTES, offset):
        yield piece
        offset += len(piece)
