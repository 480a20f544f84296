"""A script for torchrun: rank 1 dies in the first of the lives that ``--max-restarts`` gives.

With ``wait`` nobody dies: it says when its first checkpoint is there, and trains until it is told to stop.
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


class FirstSave(ds.Callback):
    """Tells of the first checkpoint."""

    ranks = "zero"

    def on_save(self, ctx: ds.SaveContext) -> None:
        if ctx.step == 2:
            print(f"saved step {ctx.step}", flush=True)


def main(output_dir: Path, wait_for_a_signal: bool) -> None:
    torch.set_num_threads(1)
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "parallel": "auto"}
    settings["save_in_background"] = False  # so that what a kill costs is certain
    steps = 1_000_000 if wait_for_a_signal else 7
    trainer = small_trainer(output_dir, JsonLogger(), DataOrder(), max_steps=steps, **settings)
    if collectives.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not wait_for_a_signal:
        FaultPlan(event=Event.AFTER_BACKWARD, count=6).arm()
    if wait_for_a_signal:
        trainer.add_callback(FirstSave())
    trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "wait" in sys.argv[2:])
