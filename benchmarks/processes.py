"""Whole processes, from start to exit, as they are after an installation: with the bytecode of all that they import.

The first start writes what is missing, in environments too that keep Python from writing any.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(words: Sequence[str | Path], *, folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python program, a file and its arguments, in ``folder``, to its end."""
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


def seconds_of(command: Sequence[str]) -> Callable[[], float]:
    """What measures the command. Raises CalledProcessError, then, if it fails."""

    def measure() -> float:
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, env=_ENVIRONMENT)
        return time.perf_counter() - began

    return measure


_TELL_PEAK = """
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


def peak_memory_of(script: str, *arguments: str) -> int:
    """The highest resident memory, in bytes, of a Python process that does no more than ``script``.

    It is that of the process's own address space. ``ru_maxrss`` would not do: on Linux a child begins with what its
    parent had reached when it was started.
    """
    command = [sys.executable, "-c", script + _TELL_PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=_ENVIRONMENT)
    return int(done.stdout.splitlines()[-1]) * 1024
