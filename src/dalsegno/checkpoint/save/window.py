"""Window: a little memory through which live tensors of any size reach a file.

A thread copies them into it, in the order of the file, ahead of the threads that write and hash what is copied. Nothing
may change the tensors until all of them are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Generator, Iterator, Sequence

import torch

from dalsegno.checkpoint.tensor_files import FileLayout
from dalsegno.errors import SaveFailed
from dalsegno.system import filesystem

from .copied_bytes import CopiedBytes
from .file_order import in_file_order
from .host_copies import SMALL
from .pages import anonymous, views
from .resources import has_memory_for

_DIRECT_PIECES = 4  # that fit into it: one is being written, the next ones are being hashed and copied
_OF_A_THREAD = 136 << 20  # bytes of address space: its stack, and what malloc reserves at its first call
_COPIED_BYTES = 2 << 20  # at once: still in the processor's cache when they are hashed


class Window:
    """Memory for a part of one file at a time: the file's byte ``p`` is at ``p`` modulo the window's length."""

    def __init__(self) -> None:
        self._memory, self._bytes = memoryview(b""), torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def has_room() -> bool:
        """Whether there is memory for it, and for the threads that copy and hash."""
        return has_memory_for(_DIRECT_PIECES * filesystem.DIRECT_PIECE + 2 * _OF_A_THREAD)

    @property
    def memory(self) -> memoryview:
        """All of it; allocated when it is first used."""
        if not self._memory:
            self._memory, self._bytes = views(anonymous(_DIRECT_PIECES * filesystem.DIRECT_PIECE))
        return self._memory

    @contextlib.contextmanager
    def filling(self, layout: FileLayout, tensors: Sequence[torch.Tensor], copied: CopiedBytes) -> Iterator[None]:
        """Copy the file of ``tensors`` on a thread of its own, which ends when the context is left."""
        thread = threading.Thread(target=self._fill, args=(layout, tensors, copied), name="dalsegno-copy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            copied.fail(SaveFailed("nothing reads it any more"))
            thread.join()

    def _fill(self, layout: FileLayout, tensors: Sequence[torch.Tensor], copied: CopiedBytes) -> None:
        try:
            for end, place, raw in _pieces(layout, tensors, self._bytes):
                copied.wait_for_room(end)
                _copy(place, raw)
                copied.advance(end)
        except BaseException as error:  # the readers wait for it
            copied.fail(error)


def copied_in_turn(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Generator[tuple[memoryview, int]]:
    """The file of ``tensors`` with neither a thread nor a window: 2 MB of memory, which the calling thread fills each
    time, and how many bytes of it are the next ones of the file."""
    memory, place_of_all = views(anonymous(_COPIED_BYTES))
    for end, place, raw in _pieces(layout, tensors, place_of_all):
        _copy(place, raw)
        if end % len(memory) == 0 or end == layout.length:
            yield memory, (end - 1) % len(memory) + 1


@torch.no_grad()
def _pieces(
    layout: FileLayout, tensors: Sequence[torch.Tensor], window: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """What is to be copied, in the order of the file: the position where it ends there, its place in ``window``, and
    its bytes."""
    position = 0
    for raw in in_file_order(layout, tensors):
        begin = 0
        while begin < len(raw):
            at = position % len(window)
            count = min(len(raw) - begin, len(window) - at, _COPIED_BYTES)
            position += count
            yield position, window[at : at + count], raw[begin : begin + count]
            begin += count


def _copy(place: torch.Tensor, raw: torch.Tensor) -> None:
    """Copy bytes. On the CPU, torch's copy waits for its thread pool, ten times as long on a busy machine."""
    if raw.is_cpu and raw.numel() > SMALL:
        ctypes.memmove(place.data_ptr(), raw.data_ptr(), raw.numel())  # releases the GIL
    else:
        place.copy_(raw)
