"""Files of a checkpoint that are ready to be written: small ones, and those of copied or of live tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.tensor_files import FileLayout
from dalsegno.system import filesystem

from .checksum import checksum_beside
from .copied_bytes import CopiedBytes
from .staging import Buffer
from .window import Window, copied_in_turn

Advance = Callable[[int], object]
"""Called with the number of bytes that are about to be written. An exception interrupts the write."""

_HASHING_LOWERED_BY = 5  # nice: a quarter of training's share; at the lowest priority a save waits seconds for it


class PendingFile(Protocol):
    """A file of a checkpoint that is ready to be written."""

    @property
    def name(self) -> str:
        """Relative to the checkpoint."""
        ...

    @property
    def length(self) -> int:
        """In bytes."""
        ...

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """Write the file durably, and return its size and checksum."""
        ...


@dataclass(frozen=True, slots=True)
class InlineFile:
    """A small file whose bytes are in memory."""

    name: str
    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)

    @contextlib.contextmanager
    def written_to(self, directory: Path, advance: Advance) -> Iterator[FileRecord]:
        """Write the file, whose size and checksum this is; it is durable once the context is left."""
        advance(self.length)
        with filesystem.written_durably(directory / self.name, [self.data]):
            yield FileRecord(self.length, xxhash.xxh3_128_hexdigest(self.data))


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file whose bytes training's thread copies into a buffer."""

    name: str
    buffer: Buffer
    copied: CopiedBytes

    @property
    def length(self) -> int:
        return self.copied.length


class StagedFile(CopiedFile):
    """One that is written and hashed meanwhile and afterwards, while training continues."""

    __slots__ = ()

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        return _write(directory / self.name, self.buffer.memory, self.copied, advance, _HASHING_LOWERED_BY)


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file of live tensors, which training leaves alone until it is written. They are copied into the window as what
    is there is written and hashed; where memory is short, all of that is done in turn."""

    name: str
    layout: FileLayout
    tensors: Sequence[torch.Tensor]
    window: Window

    @property
    def length(self) -> int:
        return self.layout.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        if not self.window.has_room():
            return _write_in_turn(directory / self.name, self.layout, self.tensors, advance)
        memory = self.window.memory
        copied = CopiedBytes(self.length, len(memory))
        with self.window.filling(self.layout, self.tensors, copied):
            return _write(directory / self.name, memory, copied, advance)


def _write(
    path: Path, memory: memoryview, copied: CopiedBytes, advance: Advance, hashing_lowered_by: int = 0
) -> FileRecord:
    """Write what is copied on the calling thread, and hash it on another one, which the first one relieves at the end.

    The writing thread takes 35 ms of processor time per GB, and has the priority of training: with the lowest one it
    waits for a turn between any two blocks, for minutes if every processor is busy.
    """
    with checksum_beside(copied.to_hash(memory), hashing_lowered_by) as checksum:
        try:
            filesystem.write_direct(path, counted(copied.to_write(memory), copied.length, advance), copied.length)
        except BaseException as error:
            copied.fail(error)  # the other threads wait for it no longer
            raise
        return FileRecord(copied.length, checksum.finish())


def _write_in_turn(path: Path, layout: FileLayout, tensors: Sequence[torch.Tensor], advance: Advance) -> FileRecord:
    """Copy, hash and write live tensors on the calling thread."""
    checksum = xxhash.xxh3_128()

    def blocks() -> Iterator[memoryview]:
        for memory, count in copied_in_turn(layout, tensors):
            checksum.update(memory[:count])
            advance(count)
            yield memory[: filesystem.whole_pages(count)]

    filesystem.write_direct(path, blocks(), layout.length)
    return FileRecord(layout.length, checksum.hexdigest())


def counted(blocks: Iterator[memoryview], length: int, advance: Advance) -> Generator[memoryview]:
    """Report each block as its turn comes. Only the first ``length`` bytes of all of them count."""
    for block in blocks:
        advance(min(len(block), length))
        length -= len(block)
        yield block
