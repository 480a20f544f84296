"""A run of 200,000 steps: what a step takes near its end, beside what it took near its beginning, and what the process
holds then.

Near its beginning is the second thousand of steps, in which nothing is done for the first time. In both thousands the
trainer takes turns with a bare loop: a machine that has become slower meanwhile is not taken for a run that has.
"""

from __future__ import annotations

import mmap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.events.contexts import Context, StepDoneContext

from .pairs import CHUNK, Turns
from .row import Row, count, duration
from .timing import figure
from .workload import BATCH, LOGGING_STEPS, Rows

STEPS = 200_000
WINDOW = 1_000
SAVE_STEPS = 5_000
STEP_LIMIT, MEMORY_LIMIT = 1.05, 1.05

SMALL = {"steps": 200, "window": CHUNK}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(steps: int = STEPS, window: int = WINDOW) -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = Rows()
    model = Small()
    first, last = Measured(rows, window, window), Measured(rows, steps - window, window)
    with (
        TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as folder,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        args = ds.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=LOGGING_STEPS,
            save_steps=SAVE_STEPS,
            save_total_limit=3,
            disable_tqdm=True,
            use_cpu=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        watching = [JsonLogger(), first, last]
        ds.Trainer(model, args, train_dataset=rows, optimizer=optimizer, callbacks=watching).train()
    return _rows(steps, window, first, last)


def _rows(steps: int, window: int, first: Measured, last: Measured) -> list[Row]:
    early, late = (
        figure([ours / bare for ours, bare in zip(each.turns.trainer, each.turns.bare, strict=True)])
        for each in (first, last)
    )
    times, grown = late / early, last.held.memory / first.held.memory
    what, early_steps = f"of {count(steps)} steps", f"steps {window + 1:,} to {2 * window:,}"
    return [
        Row(
            f"a step, the last {count(window)} {what}",
            duration(median(last.turns.trainer) / CHUNK),
            f"{early_steps}: {duration(median(first.turns.trainer) / CHUNK)}",
            f"{times:.3f} ×",
            f"≤ {STEP_LIMIT} ×",
            times <= STEP_LIMIT,
            late.spread,
        ),
        Row(
            f"memory at the end {what}",
            f"{last.held.memory / 1e6:.0f} MB",
            f"after step {2 * window:,}: {first.held.memory / 1e6:.0f} MB",
            f"{grown:.3f} ×",
            f"≤ {MEMORY_LIMIT} ×",
            grown <= MEMORY_LIMIT,
        ),
        Row(
            f"open files and threads at the end {what}",
            f"{last.held.files} and {last.held.threads}",
            f"after step {2 * window:,}: {first.held.files} and {first.held.threads}",
            target="no more",
            met=last.held.files <= first.held.files and last.held.threads <= first.held.threads,
        ),
    ]


class Small(nn.Module):
    """As little as can be trained: what is looked for is in the loop around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(features), labels)}


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    memory: int
    """Resident, in bytes."""
    files: int
    threads: int


def _held() -> Held:
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return Held(pages * mmap.PAGESIZE, len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()]))


class Measured(ds.Callback):
    """Takes turns with the bare loop in a window of the steps; at its end, notes what the process holds."""

    sets_control_flags = False

    def __init__(self, rows: Rows, begin: int, steps: int) -> None:
        self.name = f"measured from {begin}"
        self.turns = Turns(rows)
        self.held = Held(0, 0, 0)
        self._begin, self._end = begin, begin + steps

    def on_step_begin(self, ctx: Context) -> None:
        if ctx.state.global_step == self._begin:
            self.turns.begin()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        if self._begin < ctx.step <= self._end:
            self.turns.step()
        if ctx.step == self._end:
            self.held = _held()
