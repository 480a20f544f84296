"""Callbacks without ``state_dict``: the plain attributes that training changes continue in the next leg."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import dalsegno as ds
from dalsegno.checkpoint import Checkpoint, saved_states
from dalsegno.stateful import attributes
from support.listeners import Listener
from support.resumed import assert_resumes, stop_after
from support.rolling import rolling
from support.small import small_trainer


class Watcher(ds.Callback):
    """Counts and remembers, as one writes it who has not thought of a kill; stops the run by its own count."""

    def __init__(self, patience: int = 14) -> None:
        self.patience = patience
        self.steps = 0
        self.best: float | None = None
        self.window: deque[float] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.kinds: Counter[str] = Counter()
        self.losses: list[tuple[int, float]] = []
        self.mean = 0.0
        self.largest = np.float32(0)
        self.began = self.last = 0.0
        self.planned = 0

    def on_train_begin(self, ctx: Any) -> None:
        self.planned = ctx.args.max_steps
        self.began = time.time()

    def on_step_end(self, ctx: Any) -> None:
        loss = float(ctx.loss)
        self.steps += 1
        self.last = time.perf_counter()
        self.best = loss if self.best is None else min(self.best, loss)
        self.window.append(loss)
        self.seen.add(ctx.state.global_step % 5)
        self.kinds["high" if loss > 1 else "low"] += 1
        self.losses.append((self.steps, loss))
        self.mean = self.mean + (loss - self.mean) / self.steps
        self.largest = max(self.largest, np.float32(loss))
        if self.steps == self.patience:
            ctx.control.stop("enough")

    def on_log_step(self, ctx: Any) -> None:
        if ctx.kind == "final":
            ctx.logs["mean_loss"] = float(self.mean)


def watched(folder: Path, *callbacks: Any, watcher: Any = None, **changes: Any) -> ds.Trainer:
    return small_trainer(folder, watcher or Watcher(), *callbacks, **{"max_steps": 20} | changes)


def of(folder: Path, step: int) -> dict[str, Any]:
    checkpoint = Checkpoint.open(folder / f"checkpoints/step-{step:08}")
    state: dict[str, Any] = saved_states(checkpoint)["attributes"][0]
    return state


def plain(watcher: Watcher) -> dict[str, Any]:
    varying = ("began", "last", "construction")
    return {name: value for name, value in vars(watcher).items() if name not in varying}


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    last = assert_resumes(partial(watched), tmp_path, 5, 8)
    assert last.state.global_step == 14
    whole, parts = Watcher(), Watcher()
    watched(tmp_path / "again", watcher=whole).train()
    watched(tmp_path / "more", stop_after(6)).train()
    watched(tmp_path / "more", watcher=parts).train()
    assert plain(whole) == plain(parts)
    assert parts.window.maxlen == 3 and type(parts.kinds) is Counter and parts.last > 0 and parts.began > 0


def test_only_what_training_has_changed_is_saved(tmp_path: Path) -> None:
    watched(tmp_path, stop_after(4)).train()
    assert of(tmp_path, 4)["Watcher"].keys() == {
        *("steps", "best", "window", "seen", "kinds", "losses", "mean", "largest")
    }
    again = Watcher(patience=30)
    watched(tmp_path, watcher=again, max_steps=24).train()
    assert (again.steps, again.planned) == (24, 24)


def test_the_next_leg_of_the_same_process_and_a_rollback(tmp_path: Path) -> None:
    watcher = Watcher(patience=99)
    parts, stopper = watched(tmp_path / "parts", watcher=watcher, max_steps=10, save_steps=10), stop_after(5)
    parts.add_callback(stopper)
    parts.train()
    parts.remove_callback(stopper)
    assert parts.train().global_step == 10
    assert watcher.steps == of(tmp_path / "parts", 10)["Watcher"]["steps"] == 10

    counts, back = Watcher(patience=99), []

    def once(ctx: Any) -> None:
        if ctx.state.global_step == 7 and not back:
            back.append(counts.steps)
            ctx.control.roll_back("again")

    rolling(tmp_path / "rolled", Listener({"on_step_end": once}, name="once"), counts, max_steps=10).train()
    assert back == [6] and counts.steps == 10 == len(counts.losses)


def test_a_rollback_to_before_the_first_change(tmp_path: Path) -> None:
    class Counts(ds.Callback):
        steps = 0

        def on_step_end(self, ctx: Any) -> None:
            self.steps += 1
            if ctx.state.global_step == 3 and len(seen) == 0:
                seen.append(self.steps)
                ctx.control.roll_back("again")

    seen: list[int] = []
    counts = Counts()
    rolling(tmp_path, counts, max_steps=6).train()
    assert seen == [3] and counts.steps == 6


class Odd(ds.Callback):
    """With what a save must not stumble over."""

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2

    class Pair(NamedTuple):
        a: int
        b: int

    __slots__ = ("slotted",)
    total = 0

    def __init__(self) -> None:
        self.level = self.Level.LOW
        self.pair = self.Pair(0, 0)
        self.loop: list[Any] = []
        self.loop.append(self.loop)
        self.sets: dict[str, set[int]] = {"a": set()}
        self.nested: defaultdict[str, set[int]] = defaultdict(set, b={0})
        self.wide: list[list[int]] = []
        self.day = np.datetime64("2026-01-01")
        self._hidden = 0

    @property
    def hidden(self) -> int:
        return self._hidden

    def on_step_end(self, ctx: Any) -> None:
        self.level, self.pair, self.slotted = self.Level.HIGH, self.Pair(1, 2), 3
        self.day += np.timedelta64(1, "D")
        self.wide.append([*range(200)])
        self.total += 1
        self.sets["a"].add(1)
        self.nested["b"].add(1)
        vars(self)["hidden"] = self.total


def test_what_is_not_plain_is_left_to_the_callback(tmp_path: Path) -> None:
    watched(tmp_path, stop_after(4), watcher=Odd()).train()
    assert of(tmp_path, 4) == {"Odd": {"wide": [[*range(200)]] * 4, "total": 4, "hidden": 4}}
    again = Odd()
    watched(tmp_path, watcher=again, max_steps=6).train()
    assert again.total == 6 and len(again.wide) == 6


def test_beside_an_object_that_it_makes_nothing_is_saved_but_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Opens(ds.Callback):
        def __init__(self) -> None:
            self.count = 0
            self.file: Any = None
            self.is_open = False

        def on_step_end(self, ctx: Any) -> None:
            self.count += 1
            if not self.is_open:
                self.file, self.is_open = object(), True

    with caplog.at_level(logging.WARNING, "dalsegno"):
        watched(tmp_path, stop_after(4), watcher=Opens()).train()
    assert of(tmp_path, 4) == {}
    (named,) = [each for each in caplog.messages if "no checkpoint contains" in each]
    assert "the training changes Opens.count, Opens.is_open, which" in named
    again = Opens()
    watched(tmp_path, watcher=again, max_steps=6).train()
    assert again.is_open and again.file is not None and again.count == 2


def test_what_on_train_end_cleans_up_is_prepared_again(tmp_path: Path) -> None:
    class Opens(ds.Callback):
        number, steps = -1, 0

        def on_train_begin(self, ctx: Any) -> None:
            self.number = 5

        def on_step_end(self, ctx: Any) -> None:
            assert self.number == 5
            self.steps += 1

        def on_train_end(self, ctx: Any) -> None:
            self.number = -1

    opens, stopper = Opens(), stop_after(3)
    trainer = watched(tmp_path, stopper, watcher=opens, max_steps=6)
    trainer.train()
    trainer.remove_callback(stopper)
    assert trainer.train().global_step == 6 and opens.steps == 6


def test_others_keep_the_lists_that_they_share(tmp_path: Path) -> None:
    names = ["a"]

    class Adds(ds.Callback):
        def __init__(self) -> None:
            self.names = names

        def on_step_end(self, ctx: Any) -> None:
            self.names = [*self.names, "x"]

    watched(tmp_path, stop_after(2), watcher=Adds()).train()
    again = Adds()
    watched(tmp_path, watcher=again, max_steps=3).train()
    assert names == ["a"] and again.names == ["a", "x", "x", "x"]


def test_more_items_than_are_saved_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attributes, "MOST_ITEMS", 5)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        watched(tmp_path, save_steps=3).train()
    named = [each for each in caplog.messages if "no checkpoint contains" in each]
    assert named == [
        "a resumed run will differ from an uninterrupted one: the training changes Watcher.losses, which no checkpoint "
        "contains (more than 5 items, or beside other objects that the callback makes). Give the class state_dict and "
        "load_state_dict"
    ]
