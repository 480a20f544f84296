"""The checksum of a file, which several threads read.

It is computed in the order of the file. But to copy a piece out of the page cache takes four times as long as to hash
it while it is in the processor's cache: so each thread reads the next piece, and hashes it when its turn comes.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import xxhash

from dalsegno.system.machine import thread_count

_PIECE = 2 << 20  # bytes read at once: still in the processor's cache; from a cold disk, twice as fast as 1 MB


def checksum_of_file(descriptor: int, length: int) -> str:
    """Hexadecimal xxh3-128 of the first ``length`` bytes of an open file; of fewer if it ends before.

    Raises:
        OSError: if it cannot be read.
    """
    reading = _Reading(descriptor, length)
    threads = min(thread_count(), -(-length // _PIECE))
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="dalsegno-checksum") as beside:
        others = [beside.submit(reading.run) for _ in range(threads - 1)]
        reading.run()
        for other in others:
            other.result()
    return reading.checksum.hexdigest()


class _Reading:
    """A file that is being read, and the checksum of what is hashed of it."""

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor, self._length = descriptor, length
        self._begins = iter(range(0, length, _PIECE))
        self._turn = threading.Condition()
        self._hashed = 0
        self._has_failed = False
        self.checksum = xxhash.xxh3_128()

    def run(self) -> None:
        """Read and hash pieces, on each of the threads, until there are no more or one cannot be read."""
        memory = memoryview(bytearray(min(_PIECE, self._length)))
        try:
            for begin in self._begins:  # each thread takes the next one
                piece = self._read(memory[: self._length - begin], begin)
                with self._turn:
                    while self._hashed < begin and not self._has_failed:
                        self._turn.wait()
                    if self._has_failed:
                        return
                    self.checksum.update(piece)
                    self._hashed = begin + _PIECE
                    self._turn.notify_all()
        except BaseException:
            with self._turn:
                self._has_failed = True
                self._turn.notify_all()
            raise

    def _read(self, memory: memoryview, begin: int) -> memoryview:
        read = 0
        while read < len(memory) and (count := os.preadv(self._descriptor, [memory[read:]], begin + read)):
            read += count
        return memory[:read]
