"""A script for torchrun: DDP by itself, two legs, and what rank 0 has to tell, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.logs import read_records
from support.small import Line, small_trainer


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    settings = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 2, "logging_steps": 1}
    for steps in (3, 6):
        small_trainer(output_dir, JsonLogger(), model=Line(), max_steps=steps, save_steps=3, **settings).train()
    if collectives.rank() == 0:
        losses = [record["loss"] for record in read_records(output_dir / "logs/train.jsonl") if "loss" in record]
        told = {"losses": losses, "world_size": collectives.world_size()}
        (output_dir / "told.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
