"""What is not listened to costs nothing: a step calls few functions, and none of a callback that has nothing to do."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.events.table import Event
from dalsegno.testing import TinyRegression, tiny_regression_data

SOURCES = f"{Path(ds.__file__).parent}/"
STEPS = 20


class CountCalls(ds.Callback):
    """Counts the calls of dalsegno's functions in each of the steps 10 to 29, by file."""

    sets_control_flags = False

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == 10:
            sys.setprofile(self._count)
        elif ctx.step == 10 + STEPS:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        own = file.removeprefix(SOURCES)
        if event == "call" and own != file and not own.startswith("testing/"):
            self.calls[f"{own}:{frame.f_code.co_name}"] += 1


def train(run: Path, *callbacks: ds.Callback, steps: int = 30) -> ds.Trainer:
    args = ds.TrainingArguments(run, max_steps=steps, save_steps=0, logging_steps=1000, use_cpu=True, disable_tqdm=True)
    data = tiny_regression_data(512)
    trainer = ds.Trainer(TinyRegression(), args, train_dataset=data, callbacks=callbacks)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    return trainer


def test_a_step_that_does_not_log_calls_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """156 on average, with a record every 10 steps, before what is decided once was no longer asked in each step.

    As many steps are witnessed as take 0.3 % of the time: by a clock of this test's own, or a slow machine has more.
    """
    monkeypatch.setattr("dalsegno.witness.witness.perf_counter", itertools.count().__next__)
    counter = CountCalls()
    train(tmp_path / "run", JsonLogger(), counter)
    calls = {name: count / STEPS for name, count in counter.calls.items()}
    assert 30 < sum(calls.values()) < 68, calls
    files = {name.partition(":")[0] for name in calls}
    assert not files & {"system/lock.py", "callbacks/loggers/progress_callback.py", "distributed/layout.py"}


class Sleeper(ds.Callback):
    """Has nothing to do in its first leg."""

    def __init__(self) -> None:
        self.legs = 0
        self.steps: list[int] = []

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        self.legs += 1

    def idle_events(self) -> Collection[Event]:
        return [Event.STEP_END] if self.legs == 1 else []

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.steps.append(ctx.step)


def test_an_idle_handler_is_not_called_until_the_next_leg(tmp_path: Path) -> None:
    sleeper = Sleeper()
    trainer = train(tmp_path / "run", sleeper, steps=3)
    assert sleeper.steps == []
    trainer.args.max_steps = 5
    trainer.train()
    assert sleeper.steps == [4, 5]
