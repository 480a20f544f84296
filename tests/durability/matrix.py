"""Kinds of data × worker processes × ranks × places and ways to break off: what becomes of each run.

``python -m durability.matrix`` tries all of it and writes what it has shown to ``shown.json``, from which
``docs/reference/data.py`` makes its table; the tests try a part, and hold it against the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.testing import (
    BRIEF,
    THOROUGH,
    DataOrder,
    Pattern,
    TinyRegression,
    Trial,
    Verdict,
    check_resume_thoroughly,
)
from dalsegno.testing.thorough_check import worst
from durability.kinds import BATCH, KINDS
from support.small import NOISY, arguments

SHOWN = Path(__file__).with_name("shown.json")
EPOCHS = 4


class LeavesEarly(ds.Callback):
    """Ends the second epoch after its second step."""

    def on_step_end(self, ctx: Any) -> None:
        ctx.control.should_epoch_stop |= ctx.state.global_step == 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train on one kind of data. Called with a folder, it builds the trainer."""

    kind: str
    workers: int = 0
    strategy: str = "steps"
    """When it saves by itself: every second step, or at each epoch's end."""
    leaves_early: bool = False
    own_loop: bool = False
    """With ``dalsegno.Run``."""

    def __call__(self, output_dir: Path) -> ds.Trainer | OwnLoop:
        torch.manual_seed(0)
        given = KINDS[self.kind].build(workers=self.workers)
        settings: dict[str, Any] = {"save_steps": 2} if self.strategy == "steps" else {"save_strategy": "epoch"}
        args = arguments(
            output_dir,
            num_train_epochs=EPOCHS,
            lr_scheduler_type="constant",
            logging_steps=2,
            per_device_train_batch_size=BATCH // collectives.world_size(),
            dataloader_num_workers=0 if "train_dataloader" in given else self.workers,
            **settings,
        )
        callbacks: list[Any] = [JsonLogger(), DataOrder(), *([LeavesEarly()] if self.leaves_early else [])]
        if self.own_loop:
            return OwnLoop(args, given["train_dataloader"], callbacks)
        trainer = ds.Trainer(TinyRegression(), args, callbacks=callbacks, **given)
        for name in NOISY:
            trainer.remove_callback(name)
        return trainer


class OwnLoop:
    """A hand-written loop around the same."""

    def __init__(self, args: ds.TrainingArguments, loader: Any, callbacks: Sequence[Any]) -> None:
        self.args, self.loader, self.callbacks = args, loader, callbacks

    def train(self) -> Any:
        model: nn.Module = TinyRegression()
        if collectives.world_size() > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        given = {"model": model, "optimizer": optimizer, "loader": self.loader, "callbacks": self.callbacks}
        with ds.Run(self.args, **given) as run:
            for batch in run.batches():
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step_end(loss=loss)
        return run.result


def cells() -> Iterator[Cell]:
    """Every kind with and without worker processes; the rest in turn, so that each meets each kind of source."""
    for number, (name, kind) in enumerate(KINDS.items()):
        for workers in kind.workers:
            yield Cell(name, workers, *_TURNS[(number + bool(workers)) % len(_TURNS)])


_TURNS = [("steps", False), ("epoch", False), ("steps", True), ("epoch", True)]


def verdict(cell: Cell, world_size: int, folder: Path, patterns: Sequence[Pattern]) -> tuple[Verdict, list[Trial]]:
    """What becomes of one cell."""
    trials = check_resume_thoroughly(
        cell, folder=folder, world_sizes=[world_size], patterns=patterns, find_out_which=False, timeout=120.0
    )
    return worst(trials), trials


def key(cell: Cell, world_size: int) -> str:
    """By which a cell is kept in ``shown.json``."""
    return f"{cell.kind} | {cell.workers} workers | {world_size} ranks"


def shown() -> dict[str, str]:
    """What has been shown so far, by :func:`key`."""
    found: dict[str, str] = json.loads(SHOWN.read_text()) if SHOWN.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help="only these; default: all")
    parser.add_argument("--brief", action="store_true", help="four breaks for each cell, rather than two times eight")
    parser.add_argument("--write", action="store_true", help="write what has been shown to shown.json")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    options = parser.parse_args()
    silent = 0
    for cell in cells():
        if cell.workers not in options.workers or (options.kinds and cell.kind not in options.kinds):
            continue
        for world_size in options.ranks:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="dalsegno-matrix-") as folder:
                patterns = BRIEF[world_size - 1 :][:1] if options.brief else THOROUGH
                found, trials = verdict(cell, world_size, Path(folder), patterns)
            silent += found is Verdict.DIFFERENT
            print(f"{found:10} {key(cell, world_size)} ({time.monotonic() - began:.0f} s)", flush=True)
            for trial in trials:
                if trial.verdict is not Verdict.EXACT:
                    print(f"    {trial}", flush=True)
            if options.write:
                SHOWN.write_text(json.dumps(shown() | {key(cell, world_size): found}, indent=1, sort_keys=True) + "\n")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
