"""Presence: when each worker was last seen, and so whether it is alive."""

from __future__ import annotations

import time


class Presence:
    """Takes no lock.

    Args:
        timeout: seconds without a request after which a worker counts as dead; 0: never.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._seen: dict[str, float] = {}  # monotonic time of each worker's newest request

    def note(self, worker_id: str) -> None:
        """Note that a worker is alive."""
        self._seen[worker_id] = time.monotonic()

    def seconds_ago(self, worker_id: str) -> float | None:
        """Seconds since a worker was seen; None if it was not seen since the server's start."""
        seen = self._seen.get(worker_id)
        return None if seen is None else time.monotonic() - seen

    def is_alive(self, worker_id: str) -> bool:
        """Whether a worker has been seen within the timeout."""
        ago = self.seconds_ago(worker_id)
        return self.timeout == 0 or (ago is not None and ago < self.timeout)
