"""Buffers: memory for the files of a save, in which the tensors have the places that they have on disk.

With a copy in such a buffer, training continues while the bytes are written. Buffers are kept between saves, since
fresh pages cost ten times as much as copying into them.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.distributed import accelerator

from .cuda_copies import CudaCopies, pin
from .host_copies import SMALL, HostCopies
from .pages import AnonymousPages, Pages, views

_PREFAULT_BYTES = 2 << 20  # per turn: a huge page, and about a millisecond
_JOINED_TENSORS = 128  # small ones per copy


class Buffer:
    """Memory that holds a whole file as it will be on disk.

    Args:
        pages: its memory; None: of this process alone.
    """

    def __init__(self, pages: Pages | None = None) -> None:
        self._pages = pages or AnonymousPages()
        self._memory = memoryview(b"")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: FileLayout | None = None
        self._places: list[torch.Tensor] = []  # in the order of the file, as the following
        self._begins: list[int] = []
        self._groups: list[tuple[int, int]] = []  # of tensors that are copied by one call
        self._reserved = 0  # bytes from the beginning that may be touched
        self._touched = 0  # bytes from the beginning that have physical memory
        self._pinned: weakref.finalize[..., Buffer] | None = None

    def missing(self, layout: FileLayout) -> int:
        """Bytes of fresh memory that ``layout`` needs."""
        return layout.length if layout.length > len(self._memory) else 0

    def is_laid_out(self, layout: FileLayout) -> bool:
        """Whether it is laid out so; its memory may still have to be reserved."""
        return layout is self._layout

    def is_ready(self, layout: FileLayout) -> bool:
        """Whether it is laid out so, with all its memory reserved."""
        return self.is_laid_out(layout) and self._reserved >= len(self._memory)

    def lay_out(self, layout: FileLayout) -> None:
        """Make room for ``layout`` and write its header. The tensors are still to be copied.

        Raises:
            OSError: if there is no memory for the header; see :meth:`reserve` for the rest.
        """
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
        """Reserve what :meth:`prefault` has not, before a copy.

        Raises:
            OSError: if there is not enough memory.
        """
        self._reserve_until(len(self._memory))

    def prefault(self) -> Iterator[None]:
        """Reserve and touch the memory, a little at each turn, so that the first copy does not wait for page faults.

        Raises:
            OSError: if there is not enough memory.
        """
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
    def copy(self, tensors: Sequence[torch.Tensor], cuda: CudaCopies, advance: Callable[[int], object]) -> None:
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
        # To ask thousands of tensors where they are takes a tenth of the time of their copies.
        are_on_host = accelerator.kind() is None
        ordered = [tensors[number] for number in self._layout.order]
        for first, last in self._groups:
            group, places = ordered[first:last], self._places[first:last]
            if last - first > 1 and (are_on_host or all(tensor.is_cpu for tensor in group)):
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

    @property
    def memory(self) -> memoryview:
        """The file, and what follows it to the end of the last page."""
        return self._memory

    def _allocate(self, length: int) -> None:
        if self._pinned is not None:
            self._pinned()
        self._memory, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)  # free before allocating
        self._memory, self._bytes = views(self._pages.allocate(length))
        self._reserved, self._touched, self._pinned = 0, 0, None

    def _reserve_until(self, end: int) -> None:
        if end > self._reserved:
            self._pages.reserve(self._reserved, end - self._reserved)
            self._reserved = end

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
