"""Real disks that are too small."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Path]:
    """One in memory, mounted at ``place``; the test is skipped where that is not allowed."""
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "none"]
    made = subprocess.run(["mount", *options, place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)  # what is still open there goes when it is closed
