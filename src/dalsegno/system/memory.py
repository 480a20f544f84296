"""Peak resident memory of this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")

_read: tuple[int, int, int] | None = None
"""Process, its ``ru_maxrss`` when ``/proc`` was last read, and the peak in bytes that was read there."""


def peak_resident_memory() -> int:
    """Return the highest resident memory of this process so far, in bytes.

    On Linux, ``ru_maxrss`` would not do: a child process begins with the peak of its parent, even after ``exec``. But
    it grows with this process's own peak; ``/proc``, which takes twenty times as long, is read only if it may have.
    """
    global _read
    process, resident = os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if _read is not None and _read[:2] == (process, resident) and resident * 1024 <= _read[2]:
        return _read[2]
    peak = _read_status()
    if peak is None:
        return resident if sys.platform == "darwin" else resident * 1024
    _read = process, resident, peak
    return peak


def _read_status() -> int | None:
    """Return the peak in bytes; None if the system has no such file."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # in KiB, whatever "kB" says
    return None
