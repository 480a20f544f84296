"""Memory in whole pages, as direct writes require, and the blocks in which a file in it is written and hashed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Protocol

import torch

from dalsegno.system import filesystem

_HASHED_BYTES = 2 << 20  # at once: 0.2 ms of processor time


class Pages(Protocol):
    """Where a buffer's memory is from."""

    def allocate(self, length: int) -> mmap.mmap:
        """At least ``length`` bytes, in whole pages."""
        ...

    def reserve(self, begin: int, length: int) -> None:
        """Called before these bytes are touched for the first time.

        Raises:
            OSError: if there is no memory for them.
        """
        ...


class AnonymousPages:
    """Memory of this process alone."""

    def allocate(self, length: int) -> mmap.mmap:
        return anonymous(length)

    def reserve(self, begin: int, length: int) -> None: ...  # the kernel finds it as it is touched


def anonymous(length: int) -> mmap.mmap:
    """Fresh memory of at least ``length`` bytes."""
    memory = mmap.mmap(-1, filesystem.whole_pages(length))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def views(memory: mmap.mmap) -> tuple[memoryview, torch.Tensor]:
    """Two views of the same bytes."""
    return memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)


def direct_blocks(memory: memoryview, length: int) -> Iterator[memoryview]:
    """A file of ``length`` bytes, for a direct write: in whole pages.

    Args:
        memory: has the file's byte ``p`` at ``p`` modulo its own length, which is a whole number of blocks if it is
            smaller than the file.
    """
    return _blocks(memory, filesystem.whole_pages(length), filesystem.DIRECT_PIECE)


def hashed_blocks(memory: memoryview, length: int) -> Iterator[memoryview]:
    """As :func:`direct_blocks`, in small blocks, to be hashed."""
    return _blocks(memory, length, _HASHED_BYTES)


def _blocks(memory: memoryview, end: int, size: int) -> Iterator[memoryview]:
    size = min(size, len(memory))
    for begin in range(0, end, size):
        at = begin % len(memory)
        yield memory[at : at + min(size, end - begin)]
