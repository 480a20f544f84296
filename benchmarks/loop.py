"""What the training loop takes, beside a bare PyTorch loop that does the same updates."""

from __future__ import annotations

import time
from pathlib import Path

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.contexts import EpochContext

from .pairs import Paired, against_bare
from .peers import PeerMissing, ask
from .row import Row, duration
from .workload import BATCH, LOGGING_STEPS, MAX_GRAD_NORM, STEPS, Rows, parts

LIMIT = 1.05
PEERS = {"hf": "HF Trainer", "lightning": "Lightning"}


class Stopwatch(ds.Callback):
    """The epoch, from before its first batch to after its last step."""

    seconds = 0.0

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self.seconds = time.perf_counter() - self._began


def train(rows: Rows, folder: Path) -> float:
    """Seconds of our loop, with the default callbacks and JsonLogger."""
    model, optimizer, scheduler = parts()
    stopwatch = Stopwatch()
    args = ds.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=LOGGING_STEPS,
        save_steps=0,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = ds.Trainer(
        model,
        args,
        train_dataset=rows,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        callbacks=[JsonLogger(), stopwatch],
    )
    trainer.train()
    return stopwatch.seconds


def run() -> list[Row]:
    rows = [_row("Trainer, defaults and JsonLogger", against_bare(train), LIMIT)]
    for system, name in PEERS.items():
        try:
            rows.append(_row(f"for reference: {name}", ask(f"loop_{system}"), None))
        except PeerMissing as missing:
            rows.append(Row(f"for reference: {name}", str(missing), ""))
    return rows


def _row(who: str, paired: Paired, limit: float | None) -> Row:
    return Row(
        f"a step of the loop; {who}",
        duration(paired["trainer"]),
        f"bare PyTorch loop: {duration(paired['bare'])}",
        f"{paired['ratio']:.3f} ×",
        "" if limit is None else f"≤ {limit} ×",
        None if limit is None else paired["ratio"] <= limit,
    )
