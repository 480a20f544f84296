"""From SIGKILL of one of two ranks to the next finished step: ``dalsegno launch``, beside torchrun with restarts.

Both run the same script, a small model on CPU, with a checkpoint every step. After a step, a rank notes the time and
kills itself; the first step that any rank finishes after that ends the measurement.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from . import processes
from .row import Row, duration
from .timing import figure

ROUNDS = 5
TARGET = 0.5
OURS, PEER = "dalsegno launch", "torchrun --max-restarts"

SMALL = {"rounds": 1, "beside": False}
"""Of ``run``: with these it still takes seconds, and compares nothing."""

_SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data

FOLDER = Path(sys.argv[1])
FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class KillOnce(ds.Callback):
    sets_control_flags = False

    def on_step_done(self, ctx):
        if FIRST and ctx.step == 5 and os.environ["RANK"] == "1":
            (FOLDER / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        if not FIRST and not (FOLDER / "stepped").exists():
            (FOLDER / "stepped").write_text(str(time.monotonic()))


torch.manual_seed(0)
args = ds.TrainingArguments(FOLDER / "run", max_steps=8, save_steps=1, save_in_background=False, use_cpu=True)
ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(), callbacks=[KillOnce()]).train()
"""


def run(rounds: int = ROUNDS, beside: bool = True) -> list[Row]:
    """Medians of the rounds; each round measures both once, or without ``beside`` ours only."""
    programs = Path(sys.executable).parent
    commands = {OURS: [str(programs / "dalsegno"), "launch", "--nproc", "2", "--max-restarts", "1"]}
    if beside:
        torchrun = str(programs / "torchrun")
        commands[PEER] = [torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            seconds[name].append(_restart(command))
    what, ours = "from SIGKILL of one of two ranks to the next step", figure(seconds[OURS])
    if not beside:
        return [Row(what, duration(ours), f"{PEER}: left out")]
    peer = median(seconds[PEER])
    return [
        Row(
            what=what,
            ours=duration(ours),
            peer=f"{PEER}: {duration(peer)}",
            ratio=f"{ours / peer:.2f} ×",
            target=f"≤ {TARGET} ×",
            met=ours <= TARGET * peer,
            spread=ours.spread,
        )
    ]


def _restart(command: list[str]) -> float:
    with TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_SCRIPT)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = processes.run([*command, script, folder], folder=Path.cwd(), env=environment)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stderr}")
        killed, stepped = (float((Path(folder) / name).read_text()) for name in ("killed", "stepped"))
        return stepped - killed
