"""The copy of a save's tensors into memory, in which they have the places that they have in their files.

With such a copy, training continues while the bytes are written. :class:`Buffer` is the memory of one file, kept
between saves: fresh pages cost ten times as much as copying into them. :class:`Copying` fills the buffers of one save,
and :class:`CopyProgress` tells the threads that write and hash a file how far it is copied. Writing begins with the
first piece: where copying takes half as long as writing, a save would otherwise take half as long again. What comes
from a GPU is written once all of it has arrived: those copies take far less time than the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path

import torch

from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.distributed import accelerator
from dalsegno.errors import SaveFailed
from dalsegno.system import filesystem
from dalsegno.system.machine import run_on_threads, thread_count

Layouts = Mapping[str, FileLayout]
"""Layouts of files by their names."""

SMALL = 1 << 15
"""Elements: torch copies no more than that on the calling thread alone."""

_PREFAULT_BYTES = 2 << 20  # per turn: a huge page, and about a millisecond
_HASHED_BYTES = 2 << 20  # at once: 0.2 ms of processor time
_JOINED_TENSORS = 128  # small ones per copy
_PIECE_BYTES = 4 << 20  # per call: some 0.4 ms, in which the GIL is released
_ALONE_BYTES = 16 << 20  # copied by the calling thread: others would not have started by then
_MADV_WIPEONFORK = 18  # which the module mmap does not name


class Buffer:
    """Memory that holds a whole file as it will be on disk. ``path``: of a new file in shared memory whose pages it is;
    None: memory of this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._memory = memoryview(b"")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._places: list[torch.Tensor] = []  # in the order of the file, as the following
        self._begins: list[int] = []
        self._groups: list[tuple[int, int]] = []  # of tensors that are copied by one call
        self._reserved = 0  # bytes from the beginning that may be touched
        self._touched = 0  # bytes from the beginning that have physical memory
        self._pinned: weakref.finalize[..., Buffer] | None = None
        self._arrivals: list[torch.Event] = []  # of the newest copies from devices

    def missing(self, layout: FileLayout) -> int:
        return layout.length if layout.length > len(self._memory) else 0

    def is_laid_out(self, layout: FileLayout) -> bool:
        """Whether it is laid out so; its memory may still have to be reserved."""
        return layout is self._layout

    def is_ready(self, layout: FileLayout) -> bool:
        """Whether it is laid out so, with all its memory reserved."""
        return self.is_laid_out(layout) and self._reserved >= len(self._memory)

    def lay_out(self, layout: FileLayout) -> None:
        """Make room for ``layout`` and write its header. Memory for the tensors is still to be reserved."""
        if self.is_laid_out(layout):
            return
        if self.missing(layout):
            self._places = []
            self._allocate(layout.length)
        self._reserve_until(len(layout.header))
        self._memory[: len(layout.header)] = layout.header
        ordered = [(layout.spans[number], layout.chunks[number]) for number in layout.order]
        self._places = [self._bytes[slice(*span)].view(chunk.dtype).view(chunk.shape) for span, chunk in ordered]
        self._begins = [begin for (begin, _), _ in ordered]
        self._groups = list(_groups([chunk for _, chunk in ordered]))
        self._layout = layout

    def reserve(self) -> None:
        """Reserve what :meth:`prefault` has not, before a copy."""
        self._reserve_until(len(self._memory))

    def prefault(self) -> Iterator[None]:
        """Reserve and touch the memory, a little at each turn: the first copy would wait for page faults."""
        if self._layout is None:
            return
        address = self._bytes.data_ptr()
        self._touched = max(self._touched, len(self._layout.header))
        while self._touched < len(self._memory):
            count = min(_PREFAULT_BYTES, len(self._memory) - self._touched)
            self._reserve_until(self._touched + count)
            ctypes.memset(address + self._touched, 0, count)  # releases the GIL, as no slice assignment does
            self._touched += count
            yield
        self._pin()

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], advance: Callable[[int], object]) -> None:
        """Copy the tensors of the layout to their places, from any device and with any strides. Copies from devices are
        put on their current streams, before all later work, and may still be in progress. ``advance``: called, on any
        thread, with a position before which everything on the host is copied."""
        assert self._layout is not None
        self._touched = len(self._memory)
        self._pin()
        on_host = HostCopies()
        # To ask thousands of tensors where they are takes a tenth of the time of their copies.
        are_on_host, arrive_late = accelerator.kind() is None, accelerator.can_pin()
        ordered = [tensors[number] for number in self._layout.order]
        try:
            for first, last in self._groups:
                group, places = ordered[first:last], self._places[first:last]
                if last - first > 1 and (are_on_host or all(tensor.is_cpu for tensor in group)):
                    on_host.add_small(self._begins[first], places, group)
                    continue
                for begin, place, tensor in zip(self._begins[first:last], places, group, strict=True):
                    if tensor.is_cpu:
                        on_host.add(begin, place, tensor)
                    else:
                        place.copy_(tensor, non_blocking=arrive_late)
        finally:  # even those of a copy that fails still arrive
            self._arrivals = [] if are_on_host else accelerator.recorded_events(tensors)
        on_host.run(advance)
        advance(self._layout.length)

    def wait_for_devices(self) -> None:
        """Wait, on any thread, until the copies from devices are complete."""
        for arrival in self._arrivals:
            arrival.synchronize()

    @property
    def length(self) -> int:
        assert self._layout is not None
        return self._layout.length

    @property
    def memory(self) -> memoryview:
        """The file, and what follows it to the end of the last page."""
        return self._memory

    def _allocate(self, length: int) -> None:
        self.wait_for_devices()  # of a save that failed: they would arrive in memory that is others' by then
        if self._pinned is not None:
            self._pinned()
        self._memory, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)  # free before allocating
        memory = anonymous(length) if self._path is None else filesystem.map_new(self._path, length)
        self._memory, self._bytes = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
        self._reserved, self._touched, self._pinned = 0, 0, None

    def _reserve_until(self, end: int) -> None:
        if end > self._reserved:
            if self._path is not None:  # the kernel finds other memory as it is touched
                filesystem.reserve(self._path, self._reserved, end - self._reserved)
            self._reserved = end

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = weakref.finalize(self, accelerator.pin(self._bytes))
            self._pinned.atexit = False


def anonymous(length: int) -> mmap.mmap:
    """Fresh memory of at least ``length`` bytes, in whole pages, as direct writes require. Private: the kernel gives no
    huge pages to other memory. Forked processes get it empty: each page that they share would be copied once."""
    memory = mmap.mmap(-1, filesystem.whole_pages(length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # of a kernel that lacks it
                memory.madvise(advice)
    return memory


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


class NoRoom(Exception):
    """The files do not fit into memory. Raised on all ranks."""


class Slot:
    """Files of memory checkpoints in ``directory``, whose pages are written in place, save after save. They stay mapped
    when it is renamed. A file that another checkpoint has too, as a hard link, is never written to: a new one takes its
    name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._buffers: dict[str, Buffer] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def are_ready(self, files: Layouts) -> bool:
        """Whether these files are laid out, with all their memory, and are no other checkpoint's too."""
        return all(self._is_own(name) and self._buffers[name].is_ready(layout) for name, layout in files.items())

    def lay_out(self, files: Layouts) -> None:
        """Create those of the files that are not laid out yet, and keep no others."""
        for name in [*self._buffers]:
            if not (name in files and self._is_own(name) and self._buffers[name].is_laid_out(files[name])):
                self._remove(name)
        for name, layout in files.items():
            if name not in self._buffers:
                path = self.directory / name
                filesystem.mkdir_nosync(path.parent)
                filesystem.remove(path)  # a link to a file of another checkpoint
                self._buffers[name] = Buffer(path)
                self._buffers[name].lay_out(layout)

    def reserve(self, files: Layouts) -> None:
        """Lay out the files, and reserve what :meth:`prefault` has not."""
        self.lay_out(files)
        for buffer in self._buffers.values():
            buffer.reserve()

    def release(self, name: str) -> None:
        """Unmap a file that a link is going to replace."""
        self._buffers.pop(name, None)

    def clear(self) -> None:
        for name in [*self._buffers]:
            self._remove(name)

    def prefault(self) -> Iterator[None]:
        """Ends where there is no memory left, which :meth:`reserve` reports."""
        with contextlib.suppress(OSError):
            for buffer in [*self._buffers.values()]:
                yield from buffer.prefault()

    def buffer(self, name: str) -> Buffer:
        return self._buffers[name]

    def _is_own(self, name: str) -> bool:
        return name in self._buffers and filesystem.count_names(self.directory / name) == 1

    def _remove(self, name: str) -> None:
        del self._buffers[name]
        filesystem.remove(self.directory / name)


class HostCopies:
    """Copies between tensors on the CPU, to be made together, into one file, in the order in which they are added. Both
    sides outlive :meth:`run`.

    Several threads make them: one alone copies at half of the bandwidth that two have, or less, and the processors are
    free while training waits.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Callable[[], object]]] = []  # each with its position in the file
        self._bytes = 0

    def add(self, begin: int, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to ``place``, which is contiguous and has its shape and dtype. A large tensor that is not
        contiguous is copied at once. ``begin``: position of ``place`` in the file, after those before."""
        if tensor.numel() <= SMALL:
            self.add_small(begin, [place], [tensor])
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # torch's copy waits for its thread pool, ten times as long on a busy machine
            to, source, count = place.data_ptr(), tensor.data_ptr(), tensor.nbytes
            for offset in range(0, count, _PIECE_BYTES):
                move = partial(ctypes.memmove, to + offset, source + offset, min(_PIECE_BYTES, count - offset))
                self._pieces.append((begin + offset, move))
            self._bytes += count
        else:
            with torch.no_grad():
                place.copy_(tensor)

    def add_small(self, begin: int, places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        self._pieces.append((begin, partial(torch._foreach_copy_, places, tensors)))
        self._bytes += len(tensors) * tensors[0].nbytes  # about

    def run(self, advance: Callable[[int], object]) -> None:
        """Make the copies. ``advance`` is called, on any of the threads, with a position in the file before which
        everything is copied."""
        pieces = iter(self._pieces)
        threads = thread_count() if self._bytes > _ALONE_BYTES else 1
        last = self._pieces[-1][0] if self._pieces else 0
        begins = [0] * threads  # of the piece that each thread copies: all pieces before the first of them are copied

        @torch.no_grad()  # on each thread
        def copy(number: int) -> None:
            for begin, piece in pieces:  # each thread takes the next one
                begins[number] = begin
                advance(min(begins))
                piece()
            begins[number] = last  # it holds the others up no longer
            advance(min(begins))

        run_on_threads(copy, threads, "dalsegno-copy")


class CopyProgress:
    """How far one file of ``length`` bytes is copied into its buffer, for the threads that write and hash it. A thread
    is woken once for each of its blocks, not for each tensor."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._copied = threading.Condition()
        self._end = 0
        self._awaited: float = inf  # the first position that a reader waits for
        self._failure: BaseException | None = None

    def advance(self, position: int) -> None:
        with self._copied:
            self._end = max(self._end, position)
            if self._end >= self._awaited:
                self._awaited = inf
                self._copied.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will be copied, or read. Has no effect on what is copied."""
        with self._copied:
            self._failure = error
            self._copied.notify_all()

    def to_write(self, memory: memoryview) -> Generator[memoryview]:
        """The blocks of the file for a direct write, in whole pages, each once it is copied."""
        return self._blocks(memory[: filesystem.whole_pages(self.length)], filesystem.DIRECT_PIECE)

    def to_hash(self, memory: memoryview) -> Generator[memoryview]:
        """As :meth:`to_write`, in smaller blocks without what follows the file."""
        return self._blocks(memory[: self.length], _HASHED_BYTES)

    def _blocks(self, memory: memoryview, size: int) -> Generator[memoryview]:
        for begin in range(0, len(memory), size):
            self._wait_for(min(begin + size, self.length))
            yield memory[begin : begin + size]

    def _wait_for(self, position: int) -> None:
        with self._copied:
            while self._end < position:
                if self._failure is not None:
                    raise _not_copied(self._failure) from self._failure
                self._awaited = min(self._awaited, position)
                self._copied.wait()


class Copying:
    """The copies of one save, made once, on the thread that trains; what a device's current stream does afterwards
    comes after them."""

    def __init__(self) -> None:
        self._files: list[tuple[Buffer, Sequence[torch.Tensor], CopyProgress]] = []
        self._buffers: list[Buffer] = []
        self._has_begun_all = threading.Event()
        self._failure: BaseException | None = None

    def add(self, buffer: Buffer, tensors: Sequence[torch.Tensor]) -> CopyProgress:
        """Copy ``tensors`` into ``buffer``, which is laid out for them; after what was added before."""
        progress = CopyProgress(buffer.length)
        self._files.append((buffer, tensors, progress))
        return progress

    def run(self) -> None:
        """Copy; copies from GPUs may still be in progress afterwards. Does nothing the second time."""
        if self._has_begun_all.is_set():
            return
        try:
            for buffer, tensors, progress in self._files:
                buffer.copy(tensors, progress.advance)
        except BaseException as error:
            self.abandon(error)
            raise
        self._finish()

    def abandon(self, error: BaseException) -> None:
        """Let the threads that wait for a copy fail with ``error``. Has no effect when everything is copied."""
        if self._has_begun_all.is_set():
            return
        self._failure = error
        for _, _, progress in self._files:
            progress.fail(error)
        self._finish()

    def wait_for_devices(self) -> None:
        """Wait, on any thread, until all copies from GPUs are complete."""
        if accelerator.kind() is not None:
            self._has_begun_all.wait()
            if self._failure is not None:
                raise _not_copied(self._failure) from self._failure
            for buffer in self._buffers:
                buffer.wait_for_devices()

    def _finish(self) -> None:
        self._buffers = [buffer for buffer, _, _ in self._files]
        self._files = []  # the tensors are free
        self._has_begun_all.set()


def _not_copied(error: BaseException) -> SaveFailed:
    return SaveFailed(f"its state was not copied: {type(error).__name__}: {error}")
