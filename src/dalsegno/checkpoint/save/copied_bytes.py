"""CopiedBytes: how far a file is copied into memory, for the threads that write and hash it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from math import inf

from dalsegno.errors import SaveFailed

from .pages import direct_blocks, hashed_blocks


class CopiedBytes:
    """How far one file is copied, and how far it is written and hashed.

    The copying threads advance it, and those that read wait for them. Where the memory is smaller than the file, the
    copying thread also waits for both readers. A thread is woken once for each of its blocks, not for each tensor.

    Attributes:
        length: bytes of the file.

    Args:
        room: bytes of the memory, as in :func:`direct_blocks`.
    """

    def __init__(self, length: int, room: int) -> None:
        self.length = length
        self._room = room
        lock = threading.Lock()
        self._copied, self._freed = threading.Condition(lock), threading.Condition(lock)
        self._end = 0
        self._read: dict[str, float] = {"write": 0, "hash": 0}
        self._awaited: float = inf  # the first position that a reader waits for
        self._failure: BaseException | None = None

    def advance(self, position: int) -> None:
        """Everything before ``position`` is copied."""
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
            self._freed.notify_all()

    def wait_for_room(self, position: int) -> None:
        """Wait until the memory has room for everything before ``position`` that is not yet written and hashed.

        Raises:
            SaveFailed: if it will not.
        """
        with self._freed:
            self._freed.wait_for(lambda: position <= min(self._read.values()) + self._room or self._failure is not None)
            self._raise_failure()

    def to_write(self, memory: memoryview) -> Generator[memoryview]:
        """The blocks of the file for a direct write, each once it is copied; it is written when the next is asked for.

        Raises:
            SaveFailed: if it will not be copied.
        """
        return self._each_copied("write", direct_blocks(memory, self.length))

    def to_hash(self, memory: memoryview) -> Generator[memoryview]:
        """As :meth:`to_write`, the blocks to be hashed."""
        return self._each_copied("hash", hashed_blocks(memory, self.length))

    def _each_copied(self, reader: str, blocks: Iterable[memoryview]) -> Generator[memoryview]:
        end = 0
        try:
            for block in blocks:
                end = min(end + len(block), self.length)
                self._wait_for(end)
                yield block
                self._free(reader, end)
        finally:
            self._free(reader, inf)  # it may have failed; the others continue

    def _free(self, reader: str, end: float) -> None:
        with self._freed:
            self._read[reader] = end
            self._freed.notify()

    def _wait_for(self, position: int) -> None:
        with self._copied:
            while self._end < position:
                self._raise_failure()
                self._awaited = min(self._awaited, position)
                self._copied.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise not_copied(self._failure) from self._failure


def not_copied(error: BaseException) -> SaveFailed:
    """The error for threads that wait for a copy which failed with ``error``."""
    return SaveFailed(f"its state was not copied: {type(error).__name__}: {error}")
