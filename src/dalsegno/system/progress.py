"""Progress of a background thread that moves bytes, and a wait that lasts only as long as bytes move."""

from __future__ import annotations

import re
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
        """Wait until the thread is done; returns False if it stalls first.

        Args:
            wait: waits up to the given number of seconds and returns whether the thread is done.
            patience: seconds without a byte moved after which the thread counts as stalled.
            report: called every few seconds.
        """
        while not wait(min(REPORT_EVERY, max(0.0, patience - self.idle))):
            if self.idle >= patience:
                return False
            report()
        return True


# --- numbers of bytes as text ---------------------------------------------------------------------------------------


_SYMBOLS = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def format_bytes(count: int) -> str:
    """``512 B``, ``4.1 kB``, ``1.5 GB``: three digits, powers of 1000."""
    if count < 1000:
        return f"{count} B"
    value, power = float(count), 0
    while value >= 999.5 and power < len(_SYMBOLS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_SYMBOLS[power]}" if value < 999.5 else f"{value:.0f} {_SYMBOLS[power]}"


def parse_bytes(text: str) -> int:
    """Number of bytes in ``"5GB"``, ``"200 MB"``, ``"1GiB"`` or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper() or "B") if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{text!r} is not a number of bytes; use a number or a text like '5GB' or '200MB'")
    return int(float(found[1]) * unit)
