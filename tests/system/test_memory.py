"""The peak memory of a process is its own."""

from __future__ import annotations

import subprocess
import sys

from dalsegno.system.machine import peak_resident_memory

CHILD = "from dalsegno.system.machine import peak_resident_memory; print(peak_resident_memory())"


def test_a_child_does_not_count_what_its_parent_has_used() -> None:
    """On Linux, ru_maxrss would: it begins with that of the parent."""
    block = bytearray(200_000_000)
    block[::4096] = bytes(len(block[::4096]))
    assert peak_resident_memory() > 200e6
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 5e6 < int(done.stdout) < 60e6
