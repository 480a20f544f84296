"""CopiedBytes: how far a file's tensors are copied, for the threads that write and hash it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from dalsegno.errors import SaveFailed


class CopiedBytes:
    """How far one file is copied. The copying threads advance it; the others wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._end = 0
        self._failure: BaseException | None = None

    def advance(self, position: int) -> None:
        """Everything before ``position`` is copied."""
        with self._changed:
            self._end = max(self._end, position)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will be copied."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def blocks(self, blocks: Iterable[memoryview], length: int) -> Iterator[memoryview]:
        """The blocks of a file of ``length`` bytes, each once it is copied.

        Raises:
            SaveFailed: if it will not be.
        """
        end = 0
        for block in blocks:
            end = min(end + len(block), length)
            self._wait_for(end)
            yield block

    def _wait_for(self, position: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._end >= position or self._failure is not None)
            if self._end < position:
                assert self._failure is not None
                raise not_copied(self._failure) from self._failure


def not_copied(error: BaseException) -> SaveFailed:
    """What a thread raises that waits for a copy which has failed with ``error``."""
    return SaveFailed(f"its state was not copied: {type(error).__name__}: {error}")
