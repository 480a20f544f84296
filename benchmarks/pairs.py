"""Pairs: a trainer's steps and bare ones, in turns in one process.

The trainer itself gives way: after every few steps its callback takes as many bare ones. So the two sides of a pair lie
milliseconds apart, and a machine that is slow for a second is so for both. What is measured is the process's time on
the processor, with its system calls: on a quiet machine it is the time of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch

from .timing import ratio
from .workload import STEPS, Rows, bare_steps

CHUNK = 25
"""Steps on each side of a pair."""
RUNS = 9


class Turns:
    """The stopwatch of one run, which the trainer's callback holds."""

    def __init__(self, rows: Rows) -> None:
        self.trainer: list[float] = []
        """Seconds of each chunk of steps."""
        self.bare: list[float] = []
        self._bare_steps = bare_steps(rows)
        self._steps = 0
        self._began = 0.0

    def begin(self) -> None:
        """To be called where the epoch begins, before its first batch is read."""
        self._began = time.process_time()

    def step(self) -> None:
        """To be called after each of the trainer's steps."""
        self._steps += 1
        if self._steps % CHUNK == 0:
            stopped = time.process_time()
            for _ in islice(self._bare_steps, CHUNK):
                pass
            now = time.process_time()
            self.trainer.append(stopped - self._began)
            self.bare.append(now - stopped)
            self._began = now


class Paired(TypedDict):
    """Medians over all pairs."""

    bare: float
    """Seconds per step."""
    trainer: float
    ratio: float
    spread: float | None
    """Of the pairs' ratios: see :class:`benchmarks.timing.Figure`."""


def against_bare(train: Callable[[Rows, Path, Turns], object], runs: int = RUNS, steps: int = STEPS) -> Paired:
    """Measure ``train(rows, folder, turns)``, an epoch of so many steps: ``runs`` times, and once before that."""
    torch.set_num_threads(1)
    rows = Rows(steps)
    trainer: list[float] = []
    bare: list[float] = []
    for run in range(1 + runs):
        turns = Turns(rows)
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            train(rows, Path(folder), turns)
        assert len(turns.bare) == steps // CHUNK, "the trainer took another number of steps"
        if run:
            trainer += turns.trainer
            bare += turns.bare
    times = ratio(trainer, bare)
    return {
        "bare": median(bare) / CHUNK,
        "trainer": median(trainer) / CHUNK,
        "ratio": times,
        "spread": times.spread,
    }
