"""Hugging Face's Trainer over the workload: logging to its own history and to stdout, no checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.pairs import against_bare
from benchmarks.workload import BATCH, LOGGING_STEPS, MAX_GRAD_NORM, STEPS, Rows, parts


class Stopwatch(TrainerCallback):
    seconds = 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self._began


def train(rows: Rows, folder: Path) -> float:
    model, optimizer, scheduler = parts()
    stopwatch = Stopwatch()
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
    Trainer(model, args, train_dataset=rows, optimizers=(optimizer, scheduler), callbacks=[stopwatch]).train()
    return stopwatch.seconds


if __name__ == "__main__":
    print(json.dumps(against_bare(train)))
