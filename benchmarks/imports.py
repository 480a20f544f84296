"""What it takes to import dalsegno and to ask its command line for help: whole processes, from start to exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .peers import PYTHON as PEERS_PYTHON
from .processes import seconds_of
from .row import Row, duration
from .timing import figure, in_turns

ROUNDS = 7
LIMIT = 0.15

SMALL = {"rounds": 1, "beside": "numpy"}
"""Of ``run``: with these it takes a second or so, and measures nothing."""

OURS = {
    "import dalsegno": [sys.executable, "-c", "import dalsegno"],
    "dalsegno --help": [str(Path(sys.executable).with_name("dalsegno")), "--help"],
}
HF = [str(PEERS_PYTHON), "-W", "ignore", "-c", "from transformers import Trainer"]


def run(rounds: int = ROUNDS, beside: str = "torch") -> list[Row]:
    """``beside``: whose import the times are ratios to."""
    theirs = f"import {beside}"
    commands = {**OURS, theirs: [sys.executable, "-c", theirs], "import HF's Trainer": HF}
    failing = {name: why for name, command in commands.items() if (why := _why_it_fails(command))}
    working = {name: seconds_of(command) for name, command in commands.items() if name not in failing}
    seconds = {name: figure(each) for name, each in in_turns(working, rounds).items()}
    peers = [f"{name}: {failing.get(name) or duration(seconds[name])}" for name in (theirs, "import HF's Trainer")]
    rows = []
    for name in OURS:
        if name in failing:
            rows.append(Row(name, failing[name], ""))
            continue
        ratio = seconds[name] / seconds[theirs]
        ours, target = seconds[name], f"≤ {duration(LIMIT)}"
        rows.append(Row(name, duration(ours), "; ".join(peers), f"{ratio:.3f} ×", target, ours <= LIMIT, ours.spread))
    return rows


def _why_it_fails(command: list[str]) -> str:
    """Nothing if it works."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return f"not measured: no {Path(command[0]).name} at {Path(command[0]).parent.name}"
    if done.returncode == 0:
        return ""
    return f"not measured: {(done.stderr.strip() or 'no message').splitlines()[-1][:120]}"
