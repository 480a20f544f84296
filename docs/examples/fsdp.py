"""The character-level GPT with parameters, gradients and optimizer state sharded over the ranks (FSDP2).

    torchrun --nproc-per-node 2 docs/examples/fsdp.py runs/fsdp
    dalsegno launch --nproc 2 docs/examples/fsdp.py runs/fsdp        # also restarts ranks that fail

Without GPUs the ranks share the CPU, over gloo. A checkpoint of two ranks resumes on one, or on eight.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger

sys.path.insert(0, str(Path(__file__).parent))

from char_gpt import GPT, Characters


def build(output_dir: Path, steps: int = 600, width: int = 128, length: int = 128) -> ds.Trainer:
    """As in char_gpt.py, and `parallel="fsdp"`: every block of the model becomes a unit of FSDP."""
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=steps,
        parallel="fsdp",
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=max(1, steps // 60),
        save_steps=max(1, steps // 6),
    )
    model = GPT(width, layers=2, length=length)
    return ds.Trainer(model, args, train_dataset=Characters(length), callbacks=[JsonLogger(run="FSDP")])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])).train().exit_status)
