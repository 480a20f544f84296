"""The installed command, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import warm

DALSEGNO = Path(sys.executable).with_name("dalsegno")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def dalsegno(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in ``folder``, to its end."""
    return warm.run([DALSEGNO, *words], folder=folder, env=environment())


def cold(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in ``folder``, to its end, in a process that has imported nothing."""
    return subprocess.run(
        [DALSEGNO, *words], cwd=folder, env=environment(), capture_output=True, text=True, encoding="utf-8"
    )
