"""Staging: where the bytes of a checkpoint's file come from, a copy of the tensors or the live tensors.

With a copy, training continues while the bytes are written. Buffers are kept between saves, since fresh pages cost ten
times as much as copying into them. Where there is no memory for a copy, or none is wanted, live tensors are streamed
through two small bounce buffers; nothing may change the tensors until that is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from dalsegno.checkpoint.format.layout import FileLayout, TensorChunk, as_bytes
from dalsegno.checkpoint.format.manifest import FileRecord
from dalsegno.system import filesystem

from .checksum import checksum_beside
from .copied_bytes import CopiedBytes
from .cuda_copies import CudaCopies, pin
from .host_copies import SMALL, HostCopies

Advance = Callable[[int], object]
"""Called with the number of bytes that are about to be written. An exception interrupts the write."""

_PREFAULT_BYTES = 2 << 20  # per turn: a huge page, and about a millisecond
_HASHING_LOWERED_BY = 5  # nice: a quarter of training's share; at the lowest priority a save waits seconds for it
_HASHED_BYTES = 2 << 20  # at once: 0.2 ms of processor time
_JOINED_TENSORS = 128  # small ones per copy
_JOINED_BYTES = 1 << 20  # small tensors per call: still in the processor's cache in the next one


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

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        advance(self.length)
        filesystem.write_durably(directory / self.name, self.data)
        return FileRecord(self.length, xxhash.xxh3_128_hexdigest(self.data))


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file of live tensors. While one block is written to the disk, another thread copies and hashes the next one, so
    two blocks are in use at any time."""

    name: str
    length: int
    blocks: Callable[[], Iterator[memoryview]]

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        checksum = xxhash.xxh3_128()

        def hashed() -> Iterator[memoryview]:
            left = self.length
            for block in self.blocks():
                content = block[:left]
                advance(len(content))
                checksum.update(content)
                left -= len(content)
                yield block

        with contextlib.closing(_produced_ahead(hashed())) as blocks:
            filesystem.write_direct(directory / self.name, blocks, self.length)
        return FileRecord(self.length, checksum.hexdigest())


def _produced_ahead(blocks: Iterator[memoryview]) -> Generator[memoryview]:
    with ThreadPoolExecutor(1, thread_name_prefix="dalsegno-pieces") as beside:
        coming = beside.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = beside.submit(next, blocks, None)
            yield block


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file whose bytes are copied into a buffer: meanwhile and afterwards one thread writes them to the disk, and
    another one hashes them. The first one hashes what the other has not when all is written.

    The writing thread takes 35 ms of processor time per GB, and has the priority of training: with the lowest one it
    waits for a turn between any two blocks, for minutes if every processor is busy.
    """

    name: str
    buffer: Buffer
    copied: CopiedBytes

    @property
    def length(self) -> int:
        return self.buffer.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        content = self.copied.blocks(self.buffer.content(), self.length)
        with checksum_beside(content, _HASHING_LOWERED_BY) as checksum:
            blocks = self.copied.blocks(self.buffer.blocks(), self.length)
            filesystem.write_direct(directory / self.name, counted(blocks, self.length, advance), self.length)
            return FileRecord(self.length, checksum.finish())


def counted(blocks: Iterator[memoryview], length: int, advance: Advance) -> Iterator[memoryview]:
    """Report each block as its turn comes. Only the first ``length`` bytes of all of them count."""
    for block in blocks:
        advance(min(len(block), length))
        length -= len(block)
        yield block


class Buffer:
    """Memory that holds a whole file as it will be on disk.

    Args:
        allocate: returns at least that many bytes of memory, in whole pages.
    """

    def __init__(self, allocate: Callable[[int], mmap.mmap] | None = None) -> None:
        self._allocate = allocate or _anonymous
        self._memory = memoryview(b"")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._places: list[torch.Tensor] = []  # in the order of the file, as the following
        self._begins: list[int] = []
        self._groups: list[tuple[int, int]] = []  # of tensors that are copied by one call
        self._touched = 0  # bytes from the beginning that have physical memory
        self._pinned: weakref.finalize[..., Buffer] | None = None

    def missing(self, layout: FileLayout) -> int:
        """Bytes of fresh memory that ``layout`` needs."""
        return layout.length if layout.length > len(self._memory) else 0

    def lay_out(self, layout: FileLayout) -> None:
        """Make room for ``layout`` and write its header. The tensors are still to be copied."""
        if layout is self._layout:
            return
        if self.missing(layout):
            self._places = []
            self._reserve(layout.length)
        self._memory[: len(layout.header)] = layout.header
        ordered = [(layout.spans[number], layout.chunks[number]) for number in layout.order]
        self._places = [self._bytes[slice(*span)].view(chunk.dtype).view(chunk.shape) for span, chunk in ordered]
        self._begins = [begin for (begin, _), _ in ordered]
        self._groups = list(_groups([chunk for _, chunk in ordered]))
        self._layout = layout

    def prefault(self) -> Iterator[None]:
        """Touch the memory, a little at each turn, so that the first copy does not wait for page faults."""
        if self._layout is None:
            return
        address = self._bytes.data_ptr()
        self._touched = max(self._touched, len(self._layout.header))
        while self._touched < len(self._memory):
            count = min(_PREFAULT_BYTES, len(self._memory) - self._touched)
            ctypes.memset(address + self._touched, 0, count)  # releases the GIL, as no slice assignment does
            self._touched += count
            yield
        self._pin()

    def copy(self, tensors: Sequence[torch.Tensor], cuda: CudaCopies, advance: Callable[[int], object] = int) -> None:
        """Copy the tensors of the layout to their places, from any device and with any strides.

        Args:
            tensors: in the order of the layout.
            cuda: makes the copies from GPUs.
            advance: called, on any thread, with a position before which everything on the host is copied; at last with
                the length of the file.
        """
        assert self._layout is not None
        self._touched = len(self._memory)
        self._pin()
        on_host = HostCopies()
        ordered = [tensors[number] for number in self._layout.order]
        for first, last in self._groups:
            group, places = ordered[first:last], self._places[first:last]
            if last - first > 1 and all(tensor.is_cpu for tensor in group):
                on_host.add_small(self._begins[first], places, group)
                continue
            for begin, place, tensor in zip(self._begins[first:last], places, group, strict=True):
                if tensor.is_cpu:
                    on_host.add(begin, place, tensor)
                else:
                    cuda.copy(place, tensor)
        on_host.run(advance)
        advance(self._layout.length)

    @property
    def length(self) -> int:
        """Bytes of the file."""
        assert self._layout is not None
        return self._layout.length

    def blocks(self) -> Iterator[memoryview]:
        """The file, for a direct write: in whole pages."""
        return self._until(filesystem.whole_pages(self.length), filesystem.DIRECT_PIECE)

    def content(self) -> Iterator[memoryview]:
        """The file, in small blocks, to be hashed."""
        return self._until(self.length, _HASHED_BYTES)

    def _until(self, end: int, size: int) -> Iterator[memoryview]:
        for begin in range(0, end, size):
            yield self._memory[begin : min(begin + size, end)]

    def _reserve(self, length: int) -> None:
        if self._pinned is not None:
            self._pinned()
        self._memory, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)  # free before allocating
        self._memory, self._bytes = _views(self._allocate(length))
        self._touched, self._pinned = 0, None

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = weakref.finalize(self, pin(self._bytes))
            self._pinned.atexit = False


def _groups(chunks: Sequence[TensorChunk]) -> Iterator[tuple[int, int]]:
    """First number, and the one after the last, of each group of chunks that are copied together: small ones."""
    first = 0
    for number, chunk in enumerate(chunks):
        is_small = math.prod(chunk.shape) <= SMALL
        if number > first and (not is_small or number - first == _JOINED_TENSORS):
            yield first, number
            first = number
        if not is_small:
            yield first, number + 1
            first = number + 1
    if first < len(chunks):
        yield first, len(chunks)


class BounceBuffers:
    """Two small buffers through which live tensors are streamed to disk without a copy of the whole."""

    def __init__(self) -> None:
        self._bounces: list[tuple[memoryview, torch.Tensor]] = []

    def blocks(self, layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """The file of ``tensors``, for a direct write. One file at a time."""
        self._bounces = self._bounces or [_views(_anonymous(filesystem.DIRECT_PIECE)) for _ in range(2)]
        number, filled = 0, 0
        for raw in in_file_order(layout, tensors):
            begin = 0
            while begin < len(raw):
                memory, place = self._bounces[number % 2]
                count = min(len(memory) - filled, len(raw) - begin)
                part = raw[begin : begin + count]
                if part.device.type == "cpu":
                    _move(place[filled : filled + count], part)
                else:
                    place[filled : filled + count].copy_(part)
                begin, filled = begin + count, filled + count
                if filled == len(memory):
                    yield memory
                    number, filled = number + 1, 0
        if filled:
            yield self._bounces[number % 2][0][: filesystem.whole_pages(filled)]


def in_file_order(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the file, several small tensors at a time.

    Small tensors are joined by one torch call: the writing thread would otherwise wait between its blocks for the
    thread that copies a thousand of them.
    """
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    small: list[torch.Tensor] = []
    room = _JOINED_BYTES
    for number in layout.order:
        tensor = tensors[number]
        is_small = tensor.numel() <= SMALL and not tensor.is_complex()
        if small and not (is_small and tensor.nbytes <= room and _are_alike(tensor, small[0])):
            yield _joined(small)
            small, room = [], _JOINED_BYTES
        if is_small:
            small.append(tensor)
            room -= tensor.nbytes
        else:
            yield as_bytes(tensor)
    if small:
        yield _joined(small)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenated bytes of tensors of one dtype on one device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)


def _move(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy bytes on the CPU. torch's copy waits for its thread pool, ten times as long on a busy machine."""
    if tensor.numel() <= SMALL:
        place.copy_(tensor)
    else:
        ctypes.memmove(place.data_ptr(), tensor.data_ptr(), tensor.numel())  # releases the GIL


def _anonymous(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, filesystem.whole_pages(length))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _views(memory: mmap.mmap) -> tuple[memoryview, torch.Tensor]:
    return memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
