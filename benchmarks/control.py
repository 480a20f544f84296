"""What a server costs the training that it shows, and what listing jobs takes.

Blocks of steps with the server and without it alternate in one training, so that what is compared lies a moment apart.
The client is a process of its own. While there is a server, it asks for the status ten times a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

import dalsegno as ds
from dalsegno.callbacks import TrainerControlCallback
from dalsegno.control.jobs import Registration
from dalsegno.testing import TinyLanguageModel

from .observers import CONTEXT, VOCABULARY, Sentences
from .processes import seconds_of
from .row import Row, duration
from .status_client import PERIOD
from .timing import figure, in_turns, ratio

BLOCK = 25
"""Steps."""
BLOCKS = 15
"""With the server, and as many without it."""
STEP_LIMIT = 1.01
JOBS = 50
LIST_LIMIT = 0.250

SMALL = {"block": 3, "blocks": 1, "width": 24, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(block: int = BLOCK, blocks: int = BLOCKS, width: int = 192, rounds: int = 9) -> list[Row]:
    before = os.environ.get("XDG_STATE_HOME")
    with TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as folder:
        os.environ["XDG_STATE_HOME"] = folder
        try:
            return [_step(Path(folder), block, blocks, width), _list(Path(folder), rounds)]
        finally:
            if before is None:
                del os.environ["XDG_STATE_HOME"]
            else:
                os.environ["XDG_STATE_HOME"] = before


def _step(folder: Path, block: int, blocks: int, width: int) -> Row:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alternating = _Alternating(block, blocks)
    args = ds.TrainingArguments(
        folder / "run",
        max_steps=alternating.steps,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_steps=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    model = TinyLanguageModel(width=width, depth=3, heads=6, context=CONTEXT, vocabulary=VOCABULARY)
    client = subprocess.Popen([sys.executable, "-m", "benchmarks.status_client", folder], cwd=Path(__file__).parents[1])
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ds.Trainer(model, args, train_dataset=Sentences(4000), callbacks=[alternating]).train()
    finally:
        client.kill()
        client.wait()
    with_it, without = alternating.seconds[True], alternating.seconds[False]
    measured = ratio(with_it, without)
    return Row(
        "a step with the server on and a client that asks 10 times a second",
        duration(median(with_it) / block),
        f"without: {duration(median(without) / block)}",
        f"{measured:.3f} ×",
        f"≤ {STEP_LIMIT} ×",
        measured <= STEP_LIMIT,
        measured.spread,
    )


class _Alternating(ds.Callback):
    """Measures blocks of steps, every other one with a server. The first of each kind does not count."""

    sets_control_flags = False

    def __init__(self, block: int, blocks: int) -> None:
        self._block = block
        self.steps = 2 * block * (blocks + 1)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._control = TrainerControlCallback("benchmark")
        self._serves = False
        self._began = 0.0

    def on_step_begin(self, ctx: Any) -> None:
        if ctx.state.global_step % self._block == 0:
            self._began = time.perf_counter()

    def on_log(self, ctx: Any) -> None:
        if self._serves:
            self._control.on_log(ctx)

    def on_step_done(self, ctx: Any) -> None:
        if ctx.step % self._block:
            return
        seconds = time.perf_counter() - self._began
        if ctx.step > 2 * self._block:
            self.seconds[self._serves].append(seconds)
        self._serves = not self._serves
        context: Any = SimpleNamespace(
            args=ctx.args, state=ctx.state, trainer=ctx.trainer, resumed_from=None, reason="the block ends"
        )
        if self._serves:
            self._control.on_train_begin(context)
        else:
            self._control.on_train_end(context)
        time.sleep(5 * PERIOD)  # the client has noticed

    def on_train_end(self, ctx: Any) -> None:
        if self._serves:
            self._control.on_train_end(ctx)


def _list(folder: Path, rounds: int) -> Row:
    for number in range(JOBS):
        Registration(f"job_{number}", folder / "run", folder / "run/logs").publish("127.0.0.1", 8900, "token")
    command = [str(Path(sys.executable).with_name("dalsegno")), "jobs", "list"]
    bare = [sys.executable, "-c", "pass"]
    times = in_turns({"list": seconds_of(command), "bare": seconds_of(bare)}, rounds)
    seconds = figure(times["list"])
    return Row(
        f"dalsegno jobs list, {JOBS} jobs, whole process",
        duration(seconds),
        f"python -c pass: {duration(median(times['bare']))}",
        "",
        f"≤ {duration(LIST_LIMIT)}",
        seconds <= LIST_LIMIT,
        seconds.spread,
    )
