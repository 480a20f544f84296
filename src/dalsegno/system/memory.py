"""Peak resident memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_memory() -> int:
    """Return the highest resident memory of this process so far, in bytes.

    On Linux, ``ru_maxrss`` would not do: a child process begins with the peak of its parent, even after ``exec``.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # in KiB, whatever "kB" says
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
