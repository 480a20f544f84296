"""From SIGKILL to the next finished step of one process, taken apart: where a restart spends its time.

A process trains a model with 64 MB of weights and kills itself; the same script, started at once, resumes from disk, or
from memory. The parts follow each other and add up to the whole. Beside each is the same part of a script with torch
alone, which bounds it: this one loads the weights with ``torch.load``, and hashes the file first, as a verification has
to. It has no run to look for, no logs and no callbacks. The process that is killed is forked, since nothing of it is
measured; the one that resumes starts from nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from dalsegno.testing import start_ranks
from dalsegno.testing.processes import Outcome

from . import processes
from .row import Row, duration
from .timing import figure, ratio

ROUNDS = 5
WIDTH = 2048

SMALL = {"rounds": 1, "width": 16, "places": ("memory",)}
"""Of ``run``: with these it takes a few seconds, and measures nothing."""

PARTS = {
    "killed": "",
    "python": "start of Python",
    "torch": "import torch",
    "built": "import dalsegno; build model, optimizer and trainer",
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
from dalsegno.checkpoint import memory_dir
from dalsegno.testing import TinyRegression, tiny_regression_data

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


_BY_HAND = """
import json, sys, time
from pathlib import Path

moments = {"python": time.monotonic()}
import torch
import xxhash
from torch.utils.data import DataLoader, TensorDataset

moments["torch"] = time.monotonic()
FOLDER, WIDTH, FILE = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
layers.wide = torch.nn.Parameter(torch.zeros(WIDTH, 4 * 2048))
optimizer = torch.optim.AdamW(layers.parameters())
x = torch.randn(100, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
moments["built"] = time.monotonic()
if FILE.exists():
    with FILE.open("rb", buffering=0) as file:
        checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(1 << 20))
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
    moments["found"] = time.monotonic()
    saved = torch.load(FILE, weights_only=True)
    layers.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    moments["loaded"] = moments["begun"] = time.monotonic()
for x, y in loader:
    moments.setdefault("batch", time.monotonic())
    torch.nn.functional.mse_loss(layers(x), y).backward()
    torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    moments.setdefault("stepped", time.monotonic())
if not FILE.exists():
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, FILE)
(FOLDER / "moments.json").write_text(json.dumps(moments))
"""


def run(rounds: int = ROUNDS, width: int = WIDTH, places: tuple[str, ...] = ("disk", "memory")) -> list[Row]:
    """Medians of the rounds; each round measures both."""
    rows = []
    for place in places:
        rounds_of_both = [(_measured(width, place), _by_hand(width, place)) for _ in range(rounds)]
        ours, theirs = zip(*rounds_of_both, strict=True)
        rows.append(_row(f"from SIGKILL to the next step, from {place}", "killed", "stepped", ours, theirs))
        rows += [_row(f"  {PARTS[after]}", before, after, ours, theirs) for before, after in pairwise(PARTS)]
    return rows


Moments = Mapping[str, float]


def _row(what: str, before: str, after: str, ours: Sequence[Moments], theirs: Sequence[Moments]) -> Row:
    mine = figure([each[after] - each[before] for each in ours])
    other = figure([each[after] - each[before] for each in theirs])
    if not other:
        return Row(what, duration(mine), "by hand: nothing", spread=mine.spread)
    times = ratio([each[after] - each[before] for each in ours], [each[after] - each[before] for each in theirs])
    return Row(what, duration(mine), f"by hand: {duration(other)}", f"{times:.2f} ×", spread=times.spread)


def _measured(width: int, place: str) -> Moments:
    with TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as folder:  # on a disk, where /tmp may be memory
        script = _SCRIPT, folder, str(width), place
        killed = _first(*script)
        if not killed.was_killed:
            raise RuntimeError(f"the first process ended with {killed.exit_code}: {killed.error}")
        return _restarted(*script)


def _by_hand(width: int, place: str) -> Moments:
    with (
        TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as folder,
        TemporaryDirectory(prefix="benchmark-", dir=folder if place == "disk" else "/dev/shm") as files,
    ):
        script = _BY_HAND, folder, str(width), f"{files}/model.pt"
        if error := _first(*script).error:
            raise RuntimeError(error)
        return _restarted(*script)


def _first(*script: str) -> Outcome:
    """Run a script with its arguments in a forked process."""
    (outcome,) = start_ranks(_execute, 1, *script).wait()
    return outcome


def _execute(code: str, *arguments: str) -> None:
    sys.argv[1:] = arguments
    with redirect_stdout(StringIO()):
        exec(code, {"__name__": "__main__"})  # our own


def _restarted(code: str, folder: str, *arguments: str) -> Moments:
    """Run a script in a process that starts from nothing; what it notes in its folder."""
    script = Path(folder, "resume.py")
    script.write_text(code)
    began = time.monotonic()
    done = processes.run([script, folder, *arguments], folder=Path.cwd(), env=os.environ)
    if done.returncode:
        raise RuntimeError(done.stderr)
    moments: dict[str, float] = json.loads(Path(folder, "moments.json").read_text())
    return {"killed": began} | moments
