"""Hugging Face's Trainer over the workload: logging to its own history and to stdout, no checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.pairs import Turns, against_bare
from benchmarks.workload import BATCH, LOGGING_STEPS, MAX_GRAD_NORM, STEPS, Rows, parts


class TakingTurns(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._turns.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._turns.step()


def train(rows: Rows, folder: Path, turns: Turns) -> None:
    model, optimizer, scheduler = parts()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    turning = TakingTurns(turns)
    Trainer(model, args, train_dataset=rows, optimizers=(optimizer, scheduler), callbacks=[turning]).train()


if __name__ == "__main__":
    print(json.dumps(against_bare(train)))
