"""Checksums of bytes in memory, on a thread of low priority: training needs the processor more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator

import xxhash

from dalsegno.system.worker import LOWEST, lower_thread_priority


class Checksum:
    """The hexadecimal xxh3-128 of blocks, which is being computed."""

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
        """Wait for the result.

        Raises:
            BaseException: what the blocks have raised.
        """
        self._thread.join()
        return self._result()

    def finish(self) -> str:
        """As :meth:`wait`, but compute the rest on the calling thread: other processes may keep the processors busy."""
        self._is_stopping = True
        while self._hash_block():
            pass
        return self._result()

    def stop(self) -> None:
        """Stop after the current block."""
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
                self._blocks.close()  # their producer must not keep waiting
                return False

    def _result(self) -> str:
        if self._failure is not None:
            raise self._failure
        return self._checksum.hexdigest()


@contextlib.contextmanager
def checksum_beside(blocks: Generator[memoryview], lowered_by: int = LOWEST) -> Iterator[Checksum]:
    """Compute the checksum of ``blocks`` within the context. When that is left because of an exception, the computation
    ends after the current block.

    Args:
        blocks: in order. They are closed if one fails.
        lowered_by: priority of the thread that computes it: see :func:`lower_thread_priority`.
    """
    checksum = Checksum(blocks, lowered_by)
    try:
        yield checksum
    finally:
        checksum.stop()
