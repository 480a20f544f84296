"""Whole processes, from start to exit, as they are after an installation: with the bytecode of all that they import.

The first start writes it into a folder of its own; environments that keep Python from writing any do not count.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

_BYTECODE = tempfile.TemporaryDirectory(prefix="bytecode-")
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_ENVIRONMENT["PYTHONPYCACHEPREFIX"] = _BYTECODE.name


def seconds_of(command: Sequence[str]) -> Callable[[], float]:
    """What measures the command. Raises CalledProcessError, then, if it fails."""

    def measure() -> float:
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, env=_ENVIRONMENT)
        return time.perf_counter() - began

    return measure
