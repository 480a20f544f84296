"""A run under a tracker's callback of transformers, in a process of its own: trackers change the process they run in.

``python tracked.py CALLBACK there|here FOLDER [STEP]``: under transformers' own Trainer or dalsegno's, in which SIGKILL
ends it after STEP.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.integrations

import dalsegno as ds
from dalsegno.testing import tiny_regression_data
from support.models import Outputs

SETTINGS: dict[str, Any] = {
    "max_steps": 40,
    "logging_steps": 5,
    "eval_steps": 20,
    "save_steps": 20,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


class Kill(ds.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, place: str, folder: Path, killed_at: int) -> None:
    os.chdir(folder)
    callback = getattr(transformers.integrations, name)()
    parts: dict[str, Any] = {
        "train_dataset": tiny_regression_data(20),
        "eval_dataset": tiny_regression_data(8, seed=1),
    }
    torch.manual_seed(0)
    if place == "there":
        args = transformers.TrainingArguments(
            str(folder / "run"), report_to=[], label_names=["y"], eval_strategy="steps", run_name="one", **SETTINGS
        )
        transformers.Trainer(Outputs(), args, callbacks=[callback], **parts).train()
    else:
        settings = ds.TrainingArguments(folder / "run", run_name="one", save_in_background=False, **SETTINGS)
        ds.Trainer(Outputs(), settings, callbacks=[callback, Kill(killed_at)], **parts).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int([*sys.argv, "0"][4]))
