"""A script for torchrun: rank 1 dies in the first of the lives that ``--max-restarts`` gives.

In the second one it prints when a new checkpoint is there, and trains until a signal stops it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import DataOrder, FaultPlan
from support.small import small_trainer

DIES_IN, RESUMES_FROM = 6, 4
"""Steps."""


class NextSave(ds.Callback):
    """Prints the first checkpoint after the resume."""

    ranks = "zero"

    def on_save(self, ctx: ds.SaveContext) -> None:
        if ctx.step == RESUMES_FROM + 2:
            print(f"saved step {ctx.step}", flush=True)


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "parallel": "auto"}
    settings["save_in_background"] = False  # so that what a kill costs is certain
    trainer = small_trainer(output_dir, JsonLogger(), DataOrder(), NextSave(), max_steps=1_000_000, **settings)
    if collectives.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        FaultPlan(event=Event.AFTER_BACKWARD, count=DIES_IN).arm()
    trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
