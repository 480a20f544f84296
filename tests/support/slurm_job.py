"""A script for a Slurm job: in its first life, step 4 lasts until a signal has come, or until the job's end is near.

``python slurm_job.py OUTPUT_DIR signal|end``: a Trainer, or a loop of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.testing import DataOrder
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.small import small_trainer

WAITS = "waits"
"""File in ``output_dir`` that is there once step 4 has begun to wait."""


def train(output_dir: Path, *callbacks: ds.Callback) -> None:
    """Twelve steps, a record at each; a checkpoint every five."""
    small_trainer(
        output_dir,
        JsonLogger(),
        DataOrder(),
        *callbacks,
        requeue=True,
        max_steps=12,
        save_steps=5,
        logging_steps=1,
        parallel="auto",
    ).train()


def train_in_own_loop(output_dir: Path, *callbacks: ds.Callback) -> None:
    OwnLoop(output_dir, JsonLogger(), DataOrder(), *callbacks, requeue=True, max_steps=12, save_steps=5).train()


def train_and_terminate(output_dir: Path, rank: int) -> None:
    """SIGTERM is sent to that rank of several."""

    def on_step_end(ctx: Any) -> None:
        if ctx.step == 4 and collectives.rank() == rank:
            signal.raise_signal(signal.SIGTERM)

    train(output_dir, Listener({"on_step_end": on_step_end}))


def wait_for_a_signal(output_dir: Path) -> Callable[[], None]:
    """What waits for one, and is not too late if it has come already."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)

    def wait() -> None:
        (output_dir / WAITS).touch()
        os.read(reads, 1)

    return wait


def wait_for_the_end(output_dir: Path) -> Callable[[], None]:
    """Slurm ends the job in five seconds; what waits for the last of them."""
    end = time.time() + 5
    job = f"JobId={os.environ['SLURM_JOB_ID']}"
    subprocess.run(["scontrol", "update", job, f"EndTime={datetime.fromtimestamp(end):%FT%T}"], check=True)
    return lambda: time.sleep(max(0.0, end - 1 - time.time()))


def main(output_dir: Path, what: str) -> None:
    torch.set_num_threads(1)
    is_first = "SLURM_RESTART_COUNT" not in os.environ
    run, prepare = {"signal": (train, wait_for_a_signal), "end": (train_in_own_loop, wait_for_the_end)}[what]
    wait = prepare(output_dir) if is_first else None

    def on_step_end(ctx: Any) -> None:
        if wait is not None and ctx.step == 4:
            wait()

    run(output_dir, Listener({"on_step_end": on_step_end}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
