"""The disk by itself: a file written or read past the page cache, in pieces of 16 MB, one after the other."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from dalsegno.system import filesystem


def memory(size: int) -> mmap.mmap:
    """The memory that writes and copies are fastest from: private, since the kernel gives huge pages to no other."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def write(path: Path, data: memoryview, flags: int = os.O_DIRECT) -> None:
    """Write ``data``, of whole pages, with an fsync at the end. ``flags``: 0 for a plain write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        for begin in range(0, len(data), filesystem.DIRECT_PIECE):
            filesystem.write_all(descriptor, data[begin : begin + filesystem.DIRECT_PIECE], path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, memory: mmap.mmap) -> None:
    """Read all of a file, each piece into ``memory``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        while os.readv(descriptor, [memory]) == len(memory):
            pass
    finally:
        os.close(descriptor)
