"""A command to a running job on two ranks: from the call of submit() to its effect on both. Steps take about 5 ms."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.testing import TinyRegression, run_ranks, tiny_regression_data

from .row import Row, duration
from .timing import figure

COMMANDS = 200
STEP = 0.0045
"""Seconds that a step waits, beside its own work."""
LIMIT = 0.250

SMALL = {"commands": 3}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(commands: int = COMMANDS) -> list[Row]:
    """The 95th percentile, since a command waits for the ranks' next agreement: half of the time between two on
    average, all of it at worst."""
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as directory:
        (times, step), _ = run_ranks(_train, 2, directory, commands)
    slow = sorted(times)[int(0.95 * len(times))]
    return [
        Row(
            "command to effect, 2 ranks, 95 %",
            duration(slow),
            f"a step: {duration(step)}",
            "",
            f"≤ {duration(LIMIT)}",
            slow <= LIMIT,
            figure(times).spread,
        )
    ]


class _Waiting(TinyRegression):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP)
        return super().forward(x, y)


class _Client(ds.Callback):
    """Sends one command after the other on a thread of rank 0, then ends the run."""

    sets_control_flags = False
    ranks = "zero"

    def __init__(self, commands: int) -> None:
        self._commands = commands
        self.times: list[float] = []

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        threading.Thread(target=self._send, args=(ctx.trainer.commands,), daemon=True).start()

    def _send(self, queue: Any) -> None:
        pauses = random.Random(0)
        for number in range(self._commands):
            time.sleep(0.2 * pauses.random())
            began = time.perf_counter()
            queue.submit("set", {"save_steps": 1_000_000 + number}, by="the benchmark").wait()
            self.times.append(time.perf_counter() - began)
        queue.submit("abort", by="the benchmark")


def _train(directory: str, commands: int) -> tuple[list[float], float]:
    """Seconds of each command, and of a step."""
    client = _Client(commands)
    args = ds.TrainingArguments(
        directory,
        max_steps=10**6,
        save_steps=10**6,
        logging_steps=0,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = ds.Trainer(_Waiting(), args, train_dataset=tiny_regression_data(1_000_000), callbacks=[client])
    for name in ("DefaultMetrics", "ProgressCallback", "InfoCallback"):
        trainer.remove_callback(name)
    began = time.perf_counter()
    steps = trainer.train().global_step
    return client.times, (time.perf_counter() - began) / steps
