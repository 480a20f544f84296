"""Pairs: a trainer's loop and the bare one, in turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch

from .timing import in_turns, ratio
from .workload import STEPS, Rows, bare

PAIRS = 31


class Paired(TypedDict):
    bare: float
    """Seconds per step: the median."""
    trainer: float
    ratio: float
    """The median of the pairs' ratios."""


def against_bare(train: Callable[[Rows, Path], float]) -> Paired:
    """Measure ``train(rows, folder)``, the seconds of its loop over ``STEPS`` steps, beside the bare loop."""
    torch.set_num_threads(1)
    rows = Rows()

    def trainer() -> float:
        with TemporaryDirectory() as folder:
            return train(rows, Path(folder))

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        seconds = in_turns({"bare": lambda: bare(rows), "trainer": trainer}, PAIRS)
    return {
        "bare": median(seconds["bare"]) / STEPS,
        "trainer": median(seconds["trainer"]) / STEPS,
        "ratio": ratio(seconds["trainer"], seconds["bare"]),
    }
