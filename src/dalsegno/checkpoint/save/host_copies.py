"""Copies between tensors in host memory, made by several threads while training waits for them.

One thread copies at half of the bandwidth that two have, or less. The processors are free meanwhile: training waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from dalsegno.system.machine import thread_count

SMALL = 1 << 15
"""Elements: torch copies no more than that on the calling thread alone."""

_PIECE_BYTES = 4 << 20  # per call: some 0.4 ms, in which the GIL is released
_ALONE_BYTES = 16 << 20  # copied by the calling thread: others would not have started by then


class HostCopies:
    """Copies to be made together, into one file, in the order in which they are added. Both sides are on the CPU and
    outlive :meth:`run`."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Callable[[], object]]] = []  # each with its position in the file
        self._bytes = 0

    def add(self, begin: int, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to ``place``, which is contiguous and has its shape and dtype. A large tensor that is not
        contiguous is copied at once.

        Args:
            begin: position of ``place`` in the file, after the places that were added before.
        """
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
        """Copy small tensors, whose places follow each other from ``begin`` on, by one call."""
        self._pieces.append((begin, partial(torch._foreach_copy_, places, tensors)))
        self._bytes += len(tensors) * tensors[0].nbytes  # about

    def run(self, advance: Callable[[int], object]) -> None:
        """Make the copies.

        Args:
            advance: called, on any of the threads, with a position in the file before which everything is copied.
        """
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

        if threads == 1:
            copy(0)
            return
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="dalsegno-copy") as beside:
            copies = [beside.submit(copy, number) for number in range(1, threads)]
            copy(0)
            for each in copies:
                each.result()
