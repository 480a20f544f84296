"""A training with TrainerControlCallback, as a script: what the tests of ``control`` steer.

It trains until it is told to stop, or for ``--steps``; a step takes ``--pause`` seconds at least.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger, TrainerControlCallback
from dalsegno.testing import tiny_regression_data
from support.small import small_trainer


class Pause(ds.Callback):
    """Takes time at each step, and sets no flag: the ranks agree as seldom as they would without it."""

    sets_control_flags = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_begin(self, ctx: Any) -> None:
        time.sleep(self._seconds)


def controlled_trainer(
    output_dir: Path, *callbacks: Any, steps: int = 100_000, pause: float = 0.01, **settings: Any
) -> ds.Trainer:
    torch.set_num_threads(1)
    return small_trainer(
        output_dir,
        JsonLogger(),
        Pause(pause),
        *callbacks,
        parts={"eval_dataset": tiny_regression_data(6, seed=1)},
        max_steps=steps,
        **{"logging_steps": 10_000, "eval_steps": 10_000, "lr_scheduler_type": "constant", **settings},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--job-id")
    parser.add_argument("--no-http", action="store_true")
    options = parser.parse_args()
    control = TrainerControlCallback(options.job_id, enable_http=False if options.no_http else None)
    trainer = controlled_trainer(options.output_dir, control, steps=options.steps, pause=options.pause)
    result = trainer.train()
    print(result.reason, result.stopped_by, result.global_step, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
