"""How many threads of a rank move memory at once."""

from __future__ import annotations

import os

_MOST_THREADS = 4


def thread_count() -> int:
    """This rank's share of the processors that it may run on; at most 4, which saturate the memory."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, allowed // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
