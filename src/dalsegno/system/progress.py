"""Progress of a background thread that moves bytes, and a wait that lasts only as long as bytes move."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_EVERY = 5.0
"""Seconds between two reports of a wait."""


class Progress:
    """Counts bytes. One thread advances it, another may wait."""

    def __init__(self) -> None:
        self.bytes = 0
        self._moved_at = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last byte was moved; negative infinity while :meth:`pause` is in effect."""
        return time.monotonic() - self._moved_at

    def advance(self, count: int) -> None:
        """Note that ``count`` more bytes were moved. 0 restarts the clock of :attr:`idle`."""
        self.bytes += count
        self._moved_at = time.monotonic()

    def pause(self) -> None:
        """Note that the thread has no bytes to move, or waits for another process, which counts its own: until the next
        :meth:`advance`, it does not count as stalled. If both wait for each other, the limit of that wait ends it."""
        self._moved_at = float("inf")

    def wait(self, wait: Callable[[float], bool], *, patience: float, report: Callable[[], object]) -> bool:
        """Wait until the thread is done.

        Args:
            wait: waits up to the given number of seconds and returns whether the thread is done.
            patience: seconds without a byte moved after which the thread counts as stalled.
            report: called every few seconds.

        Returns:
            Whether the thread is done; False if it stalled.
        """
        while not wait(min(REPORT_EVERY, max(0.0, patience - self.idle))):
            if self.idle >= patience:
                return False
            report()
        return True
