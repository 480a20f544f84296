"""What the training loop takes, beside a bare PyTorch loop that does the same updates."""

from __future__ import annotations

from pathlib import Path

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.events.contexts import EpochContext, StepDoneContext

from .pairs import RUNS, Paired, Turns, against_bare
from .peers import PeerMissing, ask
from .row import Row, duration
from .workload import BATCH, LOGGING_STEPS, MAX_GRAD_NORM, STEPS, Rows, parts

LIMIT = 1.03
PEERS = {"hf": "HF Trainer", "lightning": "Lightning"}

SMALL = {"runs": 1, "steps": 50}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


class TakingTurns(ds.Callback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self._turns.begin()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._turns.step()


def train(rows: Rows, folder: Path, turns: Turns) -> None:
    """An epoch with the default callbacks and JsonLogger."""
    model, optimizer, scheduler = parts()
    args = ds.TrainingArguments(
        output_dir=folder,
        max_steps=rows.steps,
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
        callbacks=[JsonLogger(), TakingTurns(turns)],
    )
    trainer.train()


def run(runs: int = RUNS, steps: int = STEPS) -> list[Row]:
    rows = [_row("Trainer, defaults and JsonLogger", against_bare(train, runs, steps), LIMIT)]
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
        paired["spread"],
    )
