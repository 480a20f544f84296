"""The script that every dialect's golden sequence is recorded from: accumulation, evaluation, save, stop, exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer


class Broken(Exception):
    pass


def play(
    output_dir: Path, *callbacks: Any, stop_at: int | None = None, break_at: int | None = None, **settings: Any
) -> ds.TrainResult:
    """Two epochs of three steps: of two micro-batches, two, and one. Logs every 2 steps, evaluates two batches every 3,
    saves every 4 and at the end.

    ``stop_at``: somebody stops the training in this step. ``break_at``: an exception in its last backward.
    """

    def interfere(ctx: Any) -> None:
        step = ctx.state.global_step + 1
        if step == stop_at:
            ctx.control.stop("enough")
        if step == break_at:
            raise Broken(f"in step {step}")

    trainer = small_trainer(
        output_dir,
        *callbacks,
        Listener({"on_gradients_ready": interfere}, name="interferer"),
        parts={"eval_dataset": tiny_regression_data(8, seed=1)},
        **{
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "logging_steps": 2,
            "eval_steps": 3,
            "save_steps": 4,
            "save_in_background": False,
            "num_train_epochs": 2,
            **settings,
        },
    )
    return trainer.train()
