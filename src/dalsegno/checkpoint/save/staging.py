"""Where the bytes of a checkpoint's file come from: memory that holds a copy, or the tensors themselves.

A copy lets the training go on while its bytes are on their way. The memory is kept from save to save, since fresh
pages cost ten times what a copy into them does. Nothing is written before all is copied: with both at once, training
would stand still for a quarter longer. Where there is no room for a copy, or none is wanted, the tensors are streamed
as they are, through two small pieces of memory that are kept as well; until that is done nothing may change them.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from dalsegno.checkpoint.format.layout import FileLayout, as_bytes
from dalsegno.checkpoint.format.manifest import FileRecord
from dalsegno.system import filesystem

from .cuda_copies import CudaCopies, pin

Advance = Callable[[int], object]
"""Told how many more bytes are about to be written. What it raises breaks the writing off."""

_TOUCHED_AT_ONCE = 2 << 20  # bytes: a huge page, and about a millisecond
_SMALL = 1 << 15  # elements: torch copies no more than that on the calling thread alone
_TOGETHER = 1 << 20  # bytes of small tensors: in one call, and still in the processor's cache in the next


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
        """Write it, durably, and give its size and checksum."""
        ...


@dataclass(frozen=True, slots=True)
class InlineFile:
    """A small file, as its bytes."""

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
class TensorFile:
    """A file of tensors, in pieces that go straight to the disk."""

    name: str
    length: int
    pieces: Callable[[], Iterator[memoryview]]

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        checksum = xxhash.xxh3_128()

        def hashed() -> Iterator[memoryview]:
            left = self.length
            for piece in self.pieces():
                content = piece[:left]
                advance(len(content))
                checksum.update(content)
                left -= len(content)
                yield piece

        filesystem.write_direct(directory / self.name, hashed(), self.length)
        return FileRecord(self.length, checksum.hexdigest())


class Buffer:
    """Memory in which a file is put together as it will lie on disk."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._places: list[torch.Tensor] = []
        self._touched = 0  # bytes from the beginning that the kernel has given real memory for
        self._pinned: weakref.finalize[..., Buffer] | None = None

    def missing(self, layout: FileLayout) -> int:
        """Bytes of fresh memory that ``layout`` would take."""
        return layout.length if layout.length > len(self._memory) else 0

    def lay_out(self, layout: FileLayout) -> None:
        """Make room for ``layout``. The header is there then, the tensors are still to come."""
        if layout is self._layout:
            return
        if self.missing(layout):
            self._places = []
            self._reserve(layout.length)
        self._memory[: len(layout.header)] = layout.header
        self._places = [
            self._bytes[slice(*span)].view(piece.dtype).view(piece.shape)
            for span, piece in zip(layout.spans, layout.pieces, strict=True)
        ]
        self._layout = layout

    def prefault(self) -> Iterator[None]:
        """Have the kernel give the memory, a little at each turn: so that the first copy need not wait for it."""
        if self._layout is None:
            return
        address = self._bytes.data_ptr()
        self._touched = max(self._touched, len(self._layout.header))
        while self._touched < len(self._memory):
            count = min(_TOUCHED_AT_ONCE, len(self._memory) - self._touched)
            ctypes.memset(address + self._touched, 0, count)  # lets other threads run, as no slice assignment does
            self._touched += count
            yield
        self._pin()

    def copy(self, tensors: Sequence[torch.Tensor], devices: CudaCopies) -> None:
        """Copy the tensors of the layout to their places, from whatever device and with whatever strides."""
        assert self._layout is not None
        self._touched = len(self._memory)
        self._pin()
        small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for place, (begin, end), tensor in zip(self._places, self._layout.spans, tensors, strict=True):
            if tensor.device.type != "cpu":
                devices.copy(place, tensor)
            elif tensor.numel() <= _SMALL:
                small[0].append(place)
                small[1].append(tensor)
            elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                _move(self._bytes[begin:end], tensor.view(-1).view(torch.uint8))
            else:
                place.copy_(tensor)
        if small[0]:
            torch._foreach_copy_(*small)

    def pieces(self) -> Iterator[memoryview]:
        """The file, for a direct write."""
        assert self._layout is not None
        end = _whole_pages(self._layout.length)
        for begin in range(0, end, filesystem.DIRECT_PIECE):
            yield self._memory[begin : min(begin + filesystem.DIRECT_PIECE, end)]

    def _reserve(self, length: int) -> None:
        if self._pinned is not None:
            self._pinned()
        self._memory, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)  # not both at once
        self._memory, self._bytes = _fresh(length)
        self._touched, self._pinned = 0, None

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = weakref.finalize(self, pin(self._bytes))
            self._pinned.atexit = False


class BounceBuffers:
    """Two pieces of memory that tensors go through on their way to the disk, as they are: no copy of the whole."""

    def __init__(self) -> None:
        self._bounces: list[tuple[memoryview, torch.Tensor]] = []

    def pieces(self, layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """The file of these tensors, for a direct write. One file at a time."""
        self._bounces = self._bounces or [_fresh(filesystem.DIRECT_PIECE) for _ in range(2)]
        number, filled = 0, 0
        for raw in _in_file_order(layout, tensors):
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
            yield self._bounces[number % 2][0][: _whole_pages(filled)]


def _in_file_order(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the file; small tensors several at a time.

    Small ones are put together in one call of torch's: whoever writes would else wait between his pieces for a thread
    that is busy with a thousand small ones.
    """
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    small: list[torch.Tensor] = []
    room = _TOGETHER
    for number in sorted(range(len(tensors)), key=layout.spans.__getitem__):
        tensor = tensors[number]
        is_small = tensor.numel() <= _SMALL and not tensor.is_complex()
        if small and not (is_small and tensor.nbytes <= room and _are_alike(tensor, small[0])):
            yield _joined(small)
            small, room = [], _TOGETHER
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
    """Their bytes, one behind the other. All of one type, on one device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)


def _move(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bytes from memory to memory. torch's copy waits for threads of its own, ten times as long on a busy machine."""
    if tensor.numel() <= _SMALL:
        place.copy_(tensor)
    else:
        ctypes.memmove(place.data_ptr(), tensor.data_ptr(), tensor.numel())  # lets other threads run meanwhile


def _fresh(length: int) -> tuple[memoryview, torch.Tensor]:
    memory = mmap.mmap(-1, _whole_pages(length))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)


def _whole_pages(length: int) -> int:
    return -(-length // filesystem.PAGE) * filesystem.PAGE
