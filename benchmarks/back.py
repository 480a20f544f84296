"""From SIGKILL to the next finished step of one process, taken apart: where a restart spends its time.

A process trains a model with 64 MB of weights and kills itself; the same command, started at once, resumes from disk,
or from memory. The parts follow each other and add up to the whole.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from .row import Row, duration, three_digits
from .timing import figure

ROUNDS = 5
WIDTH = 2048

SMALL = {"rounds": 1, "width": 16, "places": ("memory",)}
"""Of ``run``: with these it takes a few seconds, and measures nothing."""

PARTS = {
    "killed": "",
    "python": "start of Python",
    "torch": "import torch",
    "dalsegno": "import dalsegno, its trainer",
    "built": "build model, optimizer and trainer",
    "found": "lock the run, find and verify the checkpoint",
    "loaded": "read the checkpoint",
    "begun": "prepare the leg",
    "batch": "first batch",
    "stepped": "first step",
}
"""Moments, and what comes before each."""

_SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

moments = {"python": time.monotonic()}
import torch

moments["torch"] = time.monotonic()
import dalsegno as ds
from dalsegno.checkpoint.format import memory_dir
from dalsegno.testing import TinyRegression, tiny_regression_data

ds.Trainer
moments["dalsegno"] = time.monotonic()
FOLDER, WIDTH, IN_MEMORY = Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3] == "memory"
RUN = FOLDER / "run"


class Wide(TinyRegression):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(WIDTH, 4 * 2048))


class Moments(ds.Callback):
    sets_control_flags = False

    def on_before_load(self, ctx):
        self.is_first = ctx.path is None
        moments["found"] = time.monotonic()

    def on_load(self, ctx):
        moments["loaded"] = time.monotonic()

    def on_train_begin(self, ctx):
        moments["begun"] = time.monotonic()

    def on_step_begin(self, ctx):
        moments.setdefault("batch", time.monotonic())

    def on_step_done(self, ctx):
        moments.setdefault("stepped", time.monotonic())
        if self.is_first and ctx.step == 6:
            while IN_MEMORY and not any(each.newest_step for each in memory_dir.find_all() if each.output_dir == RUN):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.is_first:
            (FOLDER / "moments.json").write_text(json.dumps(moments))
            ctx.control.stop("measured", save=False)


torch.manual_seed(0)
args = ds.TrainingArguments(
    RUN,
    max_steps=100,
    save_steps=50 if IN_MEMORY else 5,
    save_in_memory="Every(steps=5)" if IN_MEMORY else None,
    save_in_background=False,
    use_cpu=True,
    disable_tqdm=True,
)
trainer = ds.Trainer(Wide(), args, train_dataset=tiny_regression_data(), callbacks=[Moments()])
moments["built"] = time.monotonic()
trainer.train()
"""


def run(rounds: int = ROUNDS, width: int = WIDTH, places: tuple[str, ...] = ("disk", "memory")) -> list[Row]:
    """Medians of the rounds."""
    rows = []
    for place in places:
        moments = [_measured(width, place) for _ in range(rounds)]
        parts = {after: figure([each[after] - each[before] for each in moments]) for before, after in pairwise(PARTS)}
        whole = figure([each["stepped"] - each["killed"] for each in moments])
        rows.append(
            Row(f"from SIGKILL to the next step, from {place}", duration(whole), "not compared", spread=whole.spread)
        )
        rows += [
            Row(
                f"  {PARTS[part]}",
                duration(seconds),
                "",
                f"{three_digits(100 * seconds / whole)} % of it",
                spread=seconds.spread,
            )
            for part, seconds in parts.items()
        ]
    return rows


def _measured(width: int, place: str) -> dict[str, float]:
    with TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as folder:  # on a disk, where /tmp may be memory
        command = [sys.executable, "-c", _SCRIPT, folder, str(width), place]
        killed = subprocess.run(command, capture_output=True, text=True)
        if killed.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the first process ended with {killed.returncode}: {killed.stderr}")
        began = time.monotonic()
        subprocess.run(command, capture_output=True, check=True)
        moments: dict[str, float] = json.loads((Path(folder) / "moments.json").read_text())
        return {"killed": began} | moments
