"""Disk usage of checkpoints that share unchanged files as hard links. Needs no torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dalsegno.checkpoint.format.names import MANIFEST

Inodes = Mapping[tuple[int, int], int]
"""Size in bytes of each file, by device and inode number."""


def inodes_of(checkpoint: Path) -> Inodes:
    """The files of a checkpoint, without its manifest, and without those that are removed meanwhile."""
    found = {}
    for folder, _, names in os.walk(checkpoint):
        for path in (Path(folder, name) for name in names if name != MANIFEST):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[status.st_dev, status.st_ino] = status.st_size
    return found


def added_bytes(checkpoints: Sequence[Path]) -> dict[Path, int]:
    """Bytes that each checkpoint adds on the disk to those before it. Their sum is what all of them take."""
    seen: set[tuple[int, int]] = set()
    added = {}
    for path in checkpoints:
        own = inodes_of(path)
        added[path] = _bytes_apart_from(own, seen)
        seen |= own.keys()
    return added


def freed_bytes(checkpoint: Path, others: Iterable[Path]) -> int:
    """Bytes that the deletion of a checkpoint frees while ``others`` stay."""
    return _bytes_apart_from(inodes_of(checkpoint), {inode for other in others for inode in inodes_of(other)})


def _bytes_apart_from(inodes: Inodes, others: set[tuple[int, int]]) -> int:
    return sum(size for inode, size in inodes.items() if inode not in others)
