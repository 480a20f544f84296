"""The process that reads pickles, forked from one that has imported torch: restricted as one that starts from nothing.

Takes the place of the module ``subprocess`` in ``pickles.py``.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import warm


def run(words: Sequence[str], *, cwd: Path, env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """``python -P -m MODULE REQUEST``."""
    *_, module, request = words
    return warm.run([__file__, module, request], folder=cwd, env=env)


if __name__ == "__main__":
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
