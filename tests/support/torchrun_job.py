"""A script for torchrun, which restarts it once.

In its first life it trains a short run in two legs, for which rank 0 writes what it has to tell as JSON; then rank 1
dies inside another run. In its second life it prints when that run has a new checkpoint, and trains until a signal
stops it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.logs import read_records
from dalsegno.testing import DataOrder, FaultPlan
from support.models import Line
from support.small import small_trainer

DIES_IN, RESUMES_FROM = 6, 4
"""Steps."""


class NextSave(ds.Callback):
    """Prints the first checkpoint after the resume."""

    ranks = "zero"

    def on_save(self, ctx: ds.SaveContext) -> None:
        if ctx.step == RESUMES_FROM + 2:
            print(f"saved step {ctx.step}", flush=True)


def train_two_legs(output_dir: Path) -> None:
    """DDP by itself."""
    settings = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 2, "logging_steps": 1}
    for steps in (3, 6):
        small_trainer(output_dir, JsonLogger(), model=Line(), max_steps=steps, save_steps=3, **settings).train()
    if collectives.rank() == 0:
        losses = [record["loss"] for record in read_records(output_dir / "logs/train.jsonl") if "loss" in record]
        result = {"losses": losses, "world_size": collectives.world_size()}
        (output_dir / "result.json").write_text(json.dumps(result))


def train_until_stopped(output_dir: Path, *, dies: bool) -> None:
    """``dies``: rank 1, in step 6."""
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "parallel": "auto"}
    settings["save_in_background"] = False  # so that what a kill costs is certain
    trainer = small_trainer(output_dir, JsonLogger(), DataOrder(), NextSave(), max_steps=1_000_000, **settings)
    if dies and collectives.rank() == 1:
        FaultPlan(event=Event.AFTER_BACKWARD, count=DIES_IN).arm()
    trainer.train()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_life:
        train_two_legs(folder / "two")
    train_until_stopped(folder / "run", dies=is_first_life)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
