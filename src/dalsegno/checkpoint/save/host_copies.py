"""Copies between tensors in host memory, made by several threads while training waits for them.

One thread copies at half of the bandwidth that two have, or less. The processors are free meanwhile: training waits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

SMALL = 1 << 15
"""Elements: torch copies no more than that on the calling thread alone."""

_PIECE_BYTES = 4 << 20  # per call: some 0.4 ms, in which the GIL is released
_PIECE_TENSORS = 128
_MOST_THREADS = 4
_ALONE_BYTES = 16 << 20  # copied by the calling thread: others would not have started by then


class HostCopies:
    """Copies to be made together. Both sides are on the CPU and outlive :meth:`run`."""

    def __init__(self) -> None:
        self._large: list[Callable[[], object]] = []
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._bytes = 0

    def add(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to ``place``, which is contiguous and has its shape and dtype. A large tensor that is not
        contiguous is copied at once."""
        if tensor.numel() <= SMALL:
            self._small[0].append(place)
            self._small[1].append(tensor)
            self._bytes += tensor.nbytes
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # torch's copy waits for its thread pool, ten times as long on a busy machine
            to, source, count = place.data_ptr(), tensor.data_ptr(), tensor.nbytes
            for begin in range(0, count, _PIECE_BYTES):
                length = min(_PIECE_BYTES, count - begin)
                self._large.append(partial(ctypes.memmove, to + begin, source + begin, length))
            self._bytes += count
        else:
            place.copy_(tensor)

    def run(self) -> None:
        """Make the copies."""
        pieces = iter([*self._large, *self._small_pieces()])

        def copy() -> None:
            for piece in pieces:  # each thread takes the next one
                piece()

        others = thread_count() - 1 if self._bytes > _ALONE_BYTES else 0
        if not others:
            copy()
            return
        with ThreadPoolExecutor(others, thread_name_prefix="dalsegno-copy") as beside:
            copies = [beside.submit(copy) for _ in range(others)]
            copy()
            for each in copies:
                each.result()

    def _small_pieces(self) -> Iterator[Callable[[], object]]:
        places, tensors = self._small
        for begin in range(0, len(places), _PIECE_TENSORS):
            end = begin + _PIECE_TENSORS
            yield partial(torch._foreach_copy_, places[begin:end], tensors[begin:end])


def thread_count() -> int:
    """Threads that copy: this rank's share of the processors that it may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, allowed // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
