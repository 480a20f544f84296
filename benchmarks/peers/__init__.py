"""Peers: other systems, measured by scripts that run in their own environment and print one JSON object.

The environment is ``.venv-peers``, with the exact versions of ``benchmarks/peers.txt``; ``make peers`` builds it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class PeerMissing(Exception):
    """A peer could not be measured; the message says why, in a few words for the table."""


def ask(script: str, *arguments: str) -> Any:
    """Run ``benchmarks/peers/<script>.py`` in the peers' environment; what it printed last, read as JSON.

    Raises:
        PeerMissing: if the environment is not there, or the script fails.
    """
    if not PYTHON.exists():
        raise PeerMissing("not measured: no .venv-peers (make peers)")
    command = [str(PYTHON), "-W", "ignore", "-m", f"benchmarks.peers.{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise PeerMissing(f"not measured: {reason[:120]}")
    return json.loads(done.stdout.splitlines()[-1])
