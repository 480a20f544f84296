"""Layouts: a step under each way to spread a model, beside the same loop written by hand with torch alone.

And saving and loading a model that is spread over a 2 × 2 mesh, beside flat FSDP.

The trainer and the loop by hand take turns in the same processes, some steps each. A step is of a small transformer on
one thread a rank: forward, backward, clipping by the norm of the whole model, AdamW, schedule, and the batch. Every few
steps both sides find their mean loss; ours in a record, with speed and memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import dalsegno as ds
from dalsegno.events.contexts import Context
from dalsegno.testing import run_ranks

from .by_hand import LEARNING_RATE, MAX_GRAD_NORM, PARTS, Texts, Transformer, plan, steps_by_hand
from .row import Row, duration
from .timing import ratio

CHUNK = 5
"""Steps on each side of a pair."""
PAIRS = 15
ROUNDS = 5
WIDTH, DEPTH, BATCH = 128, 4, 8
"""Of the transformer."""
SAVED_WIDTH = 512
"""Of the model that is saved: 13 M parameters, 150 MB with the optimizer's state."""
STEP_LIMIT, SAVE_LIMIT = 1.03, 1.1

SMALL = {"width": 16, "depth": 2, "saved_width": 16, "chunk": 1, "pairs": 1, "rounds": 1, "optim": "sgd"}
"""Of ``run``: with these it takes some seconds, and measures nothing."""

LAYOUTS: dict[str, tuple[str, int, int]] = {
    "fsdp": ("FSDP of 2", 2, 2),
    "hsdp": ("HSDP of 2 × 2", 4, 4),
    "tp": ("TensorParallel of 2", 2, 1),
    "pp": ("Pipeline of 2, 1F1B", 2, 1),
}
"""Title, ranks, and ranks with different data."""
FLAT, MESH = "FSDP of 4", "TensorParallel of 2 × FSDP of 2"

Pairs = tuple[list[float], list[float]]
"""Seconds of each chunk of steps, ours and by hand."""


def run(
    width: int = WIDTH,
    depth: int = DEPTH,
    saved_width: int = SAVED_WIDTH,
    chunk: int = CHUNK,
    pairs: int = PAIRS,
    rounds: int = ROUNDS,
    optim: str = "adamw",
) -> list[Row]:
    """Medians of all pairs; of all rounds. Layouts of as many ranks are measured in the same processes."""
    seconds: dict[str, Pairs] = {}
    for ranks in sorted({ranks for _, ranks, _ in LAYOUTS.values()}):
        layouts = [layout for layout in LAYOUTS if LAYOUTS[layout][1] == ranks]
        with TemporaryDirectory() as folder:
            arguments = Path(folder), layouts, width, depth, chunk, pairs, optim
            seconds |= run_ranks(_all_steps, ranks, *arguments, timeout=1500 * len(layouts))[0]
    return [
        *(_step_row(layout, chunk, *seconds[layout]) for layout in LAYOUTS),
        *_save_rows(saved_width, depth, rounds, optim),
    ]


def _step_row(layout: str, chunk: int, ours: list[float], by_hand: list[float]) -> Row:
    times = ratio(ours, by_hand)
    return Row(
        f"a step, {LAYOUTS[layout][0]}",
        duration(median(ours) / chunk),
        f"by hand: {duration(median(by_hand) / chunk)}",
        f"{times:.3f} ×",
        f"≤ {STEP_LIMIT} ×",
        times <= STEP_LIMIT,
        times.spread,
    )


def _mode(layout: str) -> Any:
    modes: dict[str, Any] = {
        "fsdp": ds.FSDP(),
        "hsdp": ds.HSDP(replicate=2),
        "tp": ds.TensorParallel(plan()),
        "pp": ds.Pipeline(2, microbatches=PARTS),
        FLAT: ds.FSDP(),
        MESH: [ds.TensorParallel(plan(), size=2), ds.FSDP()],
    }
    return modes[layout]


class TakingTurns(ds.Callback):
    """After every few steps of the trainer's, as many by hand."""

    sets_control_flags = False  # so that the ranks do not have to agree at every step because of it

    def __init__(self, by_hand: Iterator[object], chunk: int) -> None:
        self.ours: list[float] = []
        """Seconds of each chunk of steps."""
        self.by_hand: list[float] = []
        self._steps_by_hand = by_hand
        self._chunk = chunk
        self._steps = 0
        self._began = 0.0

    def on_epoch_begin(self, ctx: Context) -> None:
        self._began = time.perf_counter()

    def on_step_done(self, ctx: Context) -> None:
        self._steps += 1
        if self._steps % self._chunk:
            return
        stopped = time.perf_counter()
        for _ in islice(self._steps_by_hand, self._chunk):
            pass
        now = time.perf_counter()
        self.ours.append(stopped - self._began)
        self.by_hand.append(now - stopped)
        self._began = now


def _all_steps(
    folder: Path, layouts: Sequence[str], width: int, depth: int, chunk: int, pairs: int, optim: str
) -> dict[str, Pairs]:
    torch.set_num_threads(1)
    return {layout: _steps(folder / layout, layout, width, depth, chunk, pairs, optim) for layout in layouts}


def _steps(folder: Path, layout: str, width: int, depth: int, chunk: int, pairs: int, optim: str) -> Pairs:
    """The first pair, in which both sides warm up, does not count."""
    _, _, data_ranks = LAYOUTS[layout]
    steps = chunk * (1 + pairs)
    texts = Texts(steps * BATCH * data_ranks)
    turns = TakingTurns(steps_by_hand(layout, width, depth, BATCH, texts, CHUNK, optim), chunk)
    _trainer(folder, layout, (width, depth), texts, steps, [turns], optim=optim).train()
    return turns.ours[1:], turns.by_hand[1:]


def _trainer(
    folder: Path,
    layout: str,
    sizes: tuple[int, int],
    texts: Texts,
    steps: int,
    callbacks: Sequence[ds.Callback],
    **settings: Any,
) -> ds.Trainer:
    args = ds.TrainingArguments(
        folder,
        parallel=_mode(layout),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=CHUNK,
        disable_tqdm=True,
        use_cpu=True,
        **({"save_steps": 0} | settings),
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer = ds.Trainer(Transformer(*sizes), args, train_dataset=texts, callbacks=callbacks)
        trainer.remove_callback("ProgressCallback")
        trainer.remove_callback("InfoCallback")
    return trainer


def _save_rows(width: int, depth: int, rounds: int, optim: str) -> list[Row]:
    with TemporaryDirectory() as folder:
        of_ranks = run_ranks(_all_saves, 4, Path(folder), width, depth, rounds, optim, timeout=1500 * rounds)
    slowest = {layout: np.max([each[layout] for each in of_ranks], axis=0) for layout in (FLAT, MESH)}
    rows = []
    for index, what in enumerate(("saving", "loading")):
        flat, mesh = (slowest[layout][:, index].tolist() for layout in (FLAT, MESH))
        times = ratio(mesh, flat)
        rows.append(
            Row(
                f"{what} under {MESH}",
                duration(median(mesh)),
                f"{FLAT}: {duration(median(flat))}",
                f"{times:.2f} ×",
                f"≤ {SAVE_LIMIT} ×",
                times <= SAVE_LIMIT,
                times.spread,
            )
        )
    return rows


class Stopwatch(ds.Callback):
    """Seconds of the last save that is waited for, and of a load."""

    def __init__(self) -> None:
        self.saving = self.loading = self._began = 0.0

    def on_before_save(self, ctx: Context) -> None:
        self._began = time.perf_counter()

    def on_save(self, ctx: Context) -> None:
        self.saving = time.perf_counter() - self._began

    def on_before_load(self, ctx: Context) -> None:
        self._began = time.perf_counter()

    def on_load(self, ctx: Context) -> None:
        self.loading = time.perf_counter() - self._began


def _all_saves(folder: Path, width: int, depth: int, rounds: int, optim: str) -> dict[str, list[tuple[float, float]]]:
    """Seconds of saving and loading, in each round."""
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {FLAT: [], MESH: []}
    for number in range(rounds):
        for layout, measured in seconds.items():
            measured.append(_saved_and_loaded(folder / f"{layout} {number}", layout, width, depth, optim))
    return seconds


def _saved_and_loaded(folder: Path, layout: str, width: int, depth: int, optim: str) -> tuple[float, float]:
    """Seconds of the second save, whose buffers and plan exist, and of a resume by another trainer, from the choice of
    the checkpoint until everything is restored."""
    saves, loads = Stopwatch(), Stopwatch()
    given = folder, layout, (width, depth), Texts(64)
    _trainer(*given, 2, [saves], save_steps=1, save_in_background=False, optim=optim).train()
    _trainer(*given, 3, [loads], optim=optim).train()
    return saves.saving, loads.loading
