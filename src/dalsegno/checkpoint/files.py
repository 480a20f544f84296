"""The files of a save, ready to be written: small ones, copied tensors, live tensors. Each is hashed meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.free_space import has_memory_for
from dalsegno.checkpoint.staging import SMALL, Buffer, CopyProgress, anonymous
from dalsegno.checkpoint.tensor_files import FileLayout, as_bytes
from dalsegno.system import filesystem
from dalsegno.system.worker import LOWEST, lower_thread_priority

Advance = Callable[[int], object]
"""Called with the number of bytes that are about to be written. An exception interrupts the write."""

_HASHING_LOWERED_BY = 5  # nice: a quarter of training's share; at the lowest priority a save waits seconds for it
_JOINED_BYTES = 1 << 20  # small tensors per call: still in the processor's cache in the next one
_OF_A_THREAD = 136 << 20  # bytes of address space: its stack, and what malloc reserves at its first call
_COPIED_BYTES = 2 << 20  # at once: still in the processor's cache when they are hashed


class PendingFile(Protocol):
    """A file of a checkpoint that is ready to be written."""

    @property
    def name(self) -> str: ...

    @property
    def length(self) -> int: ...

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


def write_hashed(path: Path, pieces: Iterable[filesystem.Buffer], advance: Advance) -> FileRecord:
    """Write a file durably from ``pieces``, which are produced meanwhile; its size and checksum."""
    checksum, size = xxhash.xxh3_128(), 0

    def hashed() -> Iterator[filesystem.Buffer]:
        nonlocal size
        for piece in pieces:
            advance(len(piece))
            checksum.update(piece)
            size += len(piece)
            yield piece

    filesystem.replace_durably_in_pieces(path, hashed())
    return FileRecord(size, checksum.hexdigest())


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file whose bytes training's thread copies into a buffer. Its write begins meanwhile."""

    name: str
    buffer: Buffer
    progress: CopyProgress

    @property
    def length(self) -> int:
        return self.progress.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """Write what is copied on the calling thread, and hash it on another one, which the first one relieves at the
        end. The writing thread takes 35 ms of processor time per GB, and has the priority of training: with the lowest
        one it waits for a turn between any two blocks, for minutes if every processor is busy."""
        memory = self.buffer.memory
        with checksum_beside(self.progress.to_hash(memory), _HASHING_LOWERED_BY) as checksum:
            try:
                blocks = counted(self.progress.to_write(memory), self.length, advance)
                filesystem.write_direct(directory / self.name, blocks, self.length)
            except BaseException as error:
                self.progress.fail(error)  # the other threads wait for it no longer
                raise
            return FileRecord(self.length, checksum.finish())


class MappedFile(StagedFile):
    """One in shared memory, to which the copy goes; what remains is its checksum."""

    __slots__ = ()

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        blocks = self.progress.to_hash(self.buffer.memory)
        with checksum_beside(counted(blocks, self.length, advance)) as checksum:
            return FileRecord(self.length, checksum.wait())


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """A file of live tensors, which training leaves alone until it is written."""

    name: str
    layout: FileLayout
    tensors: Sequence[torch.Tensor]

    @property
    def length(self) -> int:
        return self.layout.length

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """Copy and hash each block on another thread while the one before it is written. Where memory is short, the
        calling thread does all of it in turn, in smaller blocks."""
        checksum = xxhash.xxh3_128()
        is_short = not has_memory_for(2 * filesystem.DIRECT_PIECE + _OF_A_THREAD)
        if is_short:
            blocks = self._copied(checksum, min(_COPIED_BYTES, filesystem.DIRECT_PIECE), count=1)
        else:
            blocks = _one_ahead(self._copied(checksum, filesystem.DIRECT_PIECE, count=2))
        with contextlib.closing(blocks):
            filesystem.write_direct(directory / self.name, counted(blocks, self.length, advance), self.length)
        return FileRecord(self.length, checksum.hexdigest())

    @torch.no_grad()
    def _copied(self, checksum: xxhash.xxh3_128, size: int, count: int) -> Generator[memoryview]:
        """The blocks of the file, for direct writes, each copied and hashed as it is asked for. Memory holds ``count``
        blocks of ``size`` bytes: the next block replaces the oldest one."""
        room = anonymous(min(count * size, filesystem.whole_pages(self.length)))
        memory, places = memoryview(room), torch.frombuffer(room, dtype=torch.uint8)
        end = 0
        for raw in in_file_order(self.layout, self.tensors):
            done = 0
            while done < len(raw):
                at = end % len(memory)
                length = min(len(raw) - done, size - at % size, _COPIED_BYTES)
                _copy(places[at : at + length], raw[done : done + length])
                checksum.update(memory[at : at + length])
                done, end = done + length, end + length
                if end % size == 0 or end == self.length:
                    yield memory[at - at % size : filesystem.whole_pages(at + length)]


def _copy(place: torch.Tensor, raw: torch.Tensor) -> None:
    """Copy bytes. On the CPU, torch's copy waits for its thread pool, ten times as long on a busy machine."""
    if raw.is_cpu and raw.numel() > SMALL:
        ctypes.memmove(place.data_ptr(), raw.data_ptr(), raw.numel())  # releases the GIL
    else:
        place.copy_(raw)


def _one_ahead(blocks: Generator[memoryview]) -> Generator[memoryview]:
    """The same blocks; a thread makes the next one while one is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="dalsegno-copy") as beside:
        following = beside.submit(next, blocks, None)
        while (block := following.result()) is not None:
            following = beside.submit(next, blocks, None)
            yield block


def counted(blocks: Iterator[memoryview], length: int, advance: Advance) -> Generator[memoryview]:
    """Report each block as its turn comes. Only the first ``length`` bytes of all of them count."""
    for block in blocks:
        advance(min(len(block), length))
        length -= len(block)
        yield block


def in_file_order(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the file that these live tensors make. Small tensors are joined by one torch call: the writing
    thread would otherwise wait between its blocks for the thread that copies a thousand of them."""
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    small: list[torch.Tensor] = []
    room = _JOINED_BYTES
    for number in layout.order:
        tensor = tensors[number]
        is_small = tensor.numel() <= SMALL and not tensor.is_complex()
        is_alike = bool(small) and tensor.dtype == small[0].dtype and tensor.device == small[0].device
        if small and not (is_small and tensor.nbytes <= room and is_alike):
            yield _joined(small)
            small, room = [], _JOINED_BYTES
        if is_small:
            small.append(tensor)
            room -= tensor.nbytes
        else:
            yield as_bytes(tensor)
    if small:
        yield _joined(small)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenated bytes of tensors of one dtype on one device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)


class Checksum:
    """The hexadecimal xxh3-128 of blocks, computed on a thread of lower priority: training needs the processor more."""

    def __init__(self, blocks: Generator[memoryview], lowered_by: int) -> None:
        self._lowered_by = lowered_by
        self._blocks = blocks
        self._checksum = xxhash.xxh3_128()
        self._one_block = threading.Lock()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dalsegno-hash", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        self._thread.join()
        return self._result()

    def finish(self) -> str:
        """As :meth:`wait`, but compute the rest on the calling thread: other processes may keep the processors busy."""
        self._is_stopping = True
        while self._hash_block():
            pass
        return self._result()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        lower_thread_priority(self._lowered_by)
        while not self._is_stopping and self._hash_block():
            pass

    def _hash_block(self) -> bool:
        """Hash the next block, on either thread. Returns whether there was one; not after a failure, which is kept."""
        with self._one_block:
            try:
                block = next(self._blocks, None)
                if block is not None:
                    self._checksum.update(block)
                return block is not None
            except BaseException as error:
                self._failure = error
                return False

    def _result(self) -> str:
        if self._failure is not None:
            raise self._failure
        return self._checksum.hexdigest()


@contextlib.contextmanager
def checksum_beside(blocks: Generator[memoryview], lowered_by: int = LOWEST) -> Iterator[Checksum]:
    """Compute the checksum of ``blocks`` within the context, on a thread of priority ``lowered_by``. An exception ends
    it."""
    checksum = Checksum(blocks, lowered_by)
    try:
        yield checksum
    finally:
        checksum.stop()
