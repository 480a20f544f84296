"""Runs with a tracker that SIGKILL ends. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.callbacks import GradHistogram, MLflowLogger, WandbLogger
from dalsegno.callbacks.trackers.tracker_logger import TrackerLogger
from dalsegno.testing import tiny_regression_data
from support.small import small_trainer

STEPS = 12


def wandb_offline() -> TrackerLogger:
    return WandbLogger("tests", mode="offline", cards="Every(steps=4)", wait_s=300)


def mlflow() -> TrackerLogger:
    return MLflowLogger("tests", cards="Every(steps=4)", wait_s=300)


LOGGERS = {"wandb": wandb_offline, "mlflow": mlflow}


class KillOnceHandedOver(ds.Callback):
    """Ends the process after a step, once the tracker has been given all that was logged."""

    def __init__(self, logger: TrackerLogger, step: int) -> None:
        self.logger, self.step = logger, step

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == self.step:
            outbox = self.logger._outbox
            assert outbox is not None
            while outbox.waiting():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(output_dir: Path, logger: TrackerLogger, *callbacks: Any, **settings: Any) -> ds.Trainer:
    defaults = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 4, "save_steps": 4, "save_in_background": False}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    return small_trainer(
        output_dir,
        logger,
        GradHistogram(every=3, summary_writer=logger),
        *callbacks,
        parts=parts,
        **{**defaults, **settings},
    )


def train_until_killed(output_dir: Path, name: str, step: int, settings: dict[str, Any]) -> None:
    logger = LOGGERS[name]()
    trainer(output_dir, logger, KillOnceHandedOver(logger, step), **settings).train()
