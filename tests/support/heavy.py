"""Runs whose state is large and whose training is small, and what their saves are seen to do."""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.checkpoint.async_save import AsyncSave
from dalsegno.distributed import collectives
from dalsegno.system import filesystem, machine
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer

MB = 1_000_000


class Heavy(Line):
    """A line to train, and a table that is only saved."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(megabytes * MB // 4, dtype=torch.float32))


def heavy_trainer(output_dir: Path, *callbacks: Any, megabytes: int, **settings: Any) -> ds.Trainer:
    """Plain gradient descent: nearly all that is saved is the table."""
    model = Heavy(megabytes)
    parts = {"optimizer": torch.optim.SGD(model.layer.parameters(), lr=0.01)}
    return small_trainer(output_dir, *callbacks, model=model, parts=parts, **settings)


class Overtaken:
    """Finds out which saves training goes on beside: each is held up until a step begins, or training waits for it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """At which step they were captured."""
        self.callback: ds.Callback = Listener({"on_step_begin": self._note_step}, name="overtaking")
        self._training = threading.get_ident()
        self._begun = -1
        self._changed = threading.Condition()
        self._tried: set[int] = set()

    def __call__(self, operation: str, path: Path) -> None:
        """For ``files.watcher``."""
        partial = next((each.name for each in path.parents if each.name.endswith(".partial")), None)
        if operation != "write" or partial is None:
            return
        step = int(partial[5:13])
        with self._changed:
            if step not in self._tried:
                self._tried.add(step)
                while self._begun < step and not self._is_waited_for():
                    self._changed.wait(0.01)
                if self._begun >= step:
                    self.steps.append(step)

    def _is_waited_for(self) -> bool:
        frame = sys._current_frames().get(self._training)
        while frame is not None and frame.f_code is not AsyncSave.wait.__code__:
            frame = frame.f_back
        return frame is not None

    def _note_step(self, ctx: Any) -> None:
        with self._changed:
            self._begun = ctx.state.global_step
            self._changed.notify_all()


def warnings_of(work: Callable[[], object]) -> list[str]:
    """The warnings that are logged while ``work`` runs, without those of the listeners' own state. For processes of
    their own."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "which no checkpoint contains" not in record.getMessage())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dalsegno")
    logger.addHandler(handler)
    try:
        work()
    finally:
        logger.removeHandler(handler)
    return lines


def train_where_one_rank_is_short(output_dir: Path) -> tuple[list[int], list[str]]:
    """The saves beside which this rank's training continued, and the warnings."""
    if collectives.rank() == 1:
        machine._of_host = lambda: 2000  # shared by two ranks
    filesystem.watcher = overtaken = Overtaken()
    trainer = heavy_trainer(output_dir, overtaken.callback, megabytes=1, max_steps=4, save_steps=2, parallel="ddp")
    return overtaken.steps, warnings_of(trainer.train)


def train_in_little_address_space(output_dir: Path, spare: int) -> tuple[int, list[str]]:
    """With ``spare`` bytes more than there are behind the first step."""

    def limit(ctx: Any) -> None:
        if ctx.step == 1:
            has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + spare, has + spare))

    trainer = heavy_trainer(output_dir, Listener({"on_step_end": limit}), megabytes=256, max_steps=4, save_steps=2)
    warnings = warnings_of(trainer.train)
    return trainer.state.global_step, warnings


def train_in_group(output_dir: Path, tasks: Path) -> list[str]:
    """As a member of the control group whose list of processes is there."""
    tasks.write_text(str(os.getpid()))
    return warnings_of(heavy_trainer(output_dir, megabytes=256, max_steps=4, save_steps=2).train)


def resident() -> int:
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth_in_the_first_save(output_dir: Path, save_at: int) -> int:
    """By how many bytes the process grows while its first save, of 128 MB, is captured."""
    before: list[int] = []
    growth: list[int] = []

    def on_before_save(ctx: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "dalsegno-prepare":
                thread.join()
        before.append(resident())

    def on_step_begin(ctx: Any) -> None:
        if ctx.state.global_step == save_at:
            growth.append(resident() - before[0])

    listener = Listener({"on_before_save": on_before_save, "on_step_begin": on_step_begin})
    heavy_trainer(output_dir, listener, megabytes=128, max_steps=save_at + 1, save_steps=save_at).train()
    return growth[0]
