"""Growth: how much of a file is written, for those that read it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial


class Growth:
    """How much of a file is written. Advanced on one thread; awaited on event loops.

    Attributes:
        length: of the complete file, in bytes.
    """

    def __init__(self, length: int, written: int = 0) -> None:
        self.length = length
        self._written = written
        self._has_failed = False
        self._waiting: list[Callable[[], object]] = []

    @classmethod
    def complete(cls, length: int) -> Growth:
        """Of a file that is not written any more."""
        return cls(length, length)

    def advance(self, written: int) -> None:
        """Note that so many bytes are written, from the beginning of the file."""
        self._written = written
        self._wake()

    def fail(self) -> None:
        """Note that no more bytes will be written."""
        self._has_failed = True
        self._wake()

    async def beyond(self, begin: int) -> int:
        """Wait until more than ``begin`` bytes are written, and return how many are.

        Raises:
            EOFError: if they will not be written.
        """
        while self._written <= begin:
            woken = asyncio.Event()
            self._waiting.append(partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set))
            if self._written > begin:  # advanced before this was in the list, so perhaps nothing wakes it
                break
            if self._has_failed:
                raise EOFError("the file is not written to its end")
            await woken.wait()
        return self._written

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                wake()
