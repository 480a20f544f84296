"""Background: observers that the training never feels, and what they are shown."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import DefaultMetrics
from dalsegno.events.table import Event
from support.listeners import Listener, Trace
from support.small import same, small_trainer, weights


class Slow(ds.Callback):
    """Waits in its first step until it may continue, then reports what it received."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.seen: list[tuple[int, float, float]] = []
        self.ended = False

    def on_step_end(self, ctx: Any) -> None:
        assert self.go_on.wait(60)
        self.seen.append((ctx.step, ctx.elapsed, ctx.loss))

    def on_train_end(self, ctx: Any) -> None:
        self.ended = True


def test_a_slow_one_delays_nobody_and_sees_what_was(tmp_path: Path) -> None:
    slow, native = Slow(), list[tuple[int, float]]()
    heard = threading.Event()
    prompt = Listener({"on_step_end": lambda ctx: heard.set() if ctx.step == 5 else None}, name="prompt")

    def release(ctx: Any) -> None:
        assert heard.wait(60), "the other observer is not kept waiting"
        slow.go_on.set()

    note = Listener({"on_step_end": lambda ctx: native.append((ctx.step, ctx.loss)), "on_train_end": release})
    small_trainer(tmp_path, note, ds.Background(slow), ds.Background(prompt), max_steps=5).train()
    assert [(step, loss) for step, _, loss in slow.seen] == native
    elapsed = [seconds for _, seconds, _ in slow.seen]
    assert elapsed == sorted(set(elapsed)), "a clock that stands still, for each its own"
    assert slow.ended, "waited for"


def test_a_record_stays_as_it_was(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    go_on = threading.Event()

    def keep(ctx: Any) -> None:
        assert go_on.wait(60)
        seen.append(dict(ctx.logs))

    release = Listener({"on_train_end": lambda ctx: go_on.set()}, name="release")
    observer = ds.Background(Listener({"on_log": keep}, name="observer"))
    late = Listener({"on_log": lambda ctx: ctx.logs.clear()}, name="late")
    small_trainer(tmp_path, release, observer, late, max_steps=2, logging_steps=1).train()
    assert [bool(record) for record in seen] == [True] * 3


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_it_raises_is_counted_and_never_felt(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ctx: Any) -> None:
        raise error

    observer = ds.Background(ds.on(Event.STEP_END, fail))
    trainer, plain = small_trainer(tmp_path / "a", observer, max_steps=3), small_trainer(tmp_path / "b", max_steps=3)
    assert (trainer.train().reason, plain.train().reason) == ("finished", "finished")
    assert same(weights(trainer), weights(plain))
    assert (observer.counts.ran, observer.counts.failed, observer.counts.dropped) == (3, 3, 0)
    assert "fail, in the background: 3 calls, 3 failed, 0 dropped" in caplog.text


def test_async_handlers_are_awaited(tmp_path: Path) -> None:
    seen: list[int] = []

    @ds.on(Event.STEP_END, every=2)
    async def note(ctx: Any) -> None:
        seen.append(ctx.step)

    small_trainer(tmp_path, ds.Background(note), max_steps=5).train()
    assert seen == [2, 4]


def test_a_full_queue_forgets_the_oldest(tmp_path: Path) -> None:
    slow = Slow()
    observer = ds.Background(slow, queue=2)
    release = Listener({"on_train_end": lambda ctx: slow.go_on.set()})
    small_trainer(tmp_path, release, observer, max_steps=9).train()
    assert slow.seen[-1][0] == 9 and slow.ended
    assert observer.counts.dropped + observer.counts.ran == 10 and observer.counts.dropped >= 7


def test_or_lets_the_training_wait(tmp_path: Path) -> None:
    seen: list[int] = []
    observer = ds.Background(ds.on(Event.STEP_END, lambda ctx: seen.append(ctx.step)), queue=1, when_full="block")
    small_trainer(tmp_path, observer, max_steps=20).train()
    assert seen == list(range(1, 21))
    assert observer.counts.dropped == 0


def test_flags_are_not_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = ds.Background(ds.on(Event.STEP_END, lambda ctx: ctx.control.stop("please"), name="asks"))
    assert small_trainer(tmp_path, observer, max_steps=3).train().reason == "finished"
    assert caplog.text.count("asks, in the background: it set a flag of the control, which has no effect") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.Background(Trace()), r"Background\(Trace\): it has state"),
        (lambda: ds.Background(Trace), "Trace is a class"),
        (lambda: ds.Background(DefaultMetrics()), r"Background\(DefaultMetrics\): on_log_step extends a record"),
        (lambda: ds.Background(Listener({}), queue=0), "queue=0; needs an integer of at least 1"),
        (lambda: ds.Background(Listener({}), when_full="wait"), "when_full='wait'; allowed are 'drop_oldest', 'block'"),
        (lambda: ds.Background(ds.Background(Listener({}))), "already runs in the background"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises((ds.ConfigurationError, TypeError), match=message):
        make()


def test_two_of_one_class_and_global_ones(tmp_path: Path) -> None:
    first, second = Listener({}), Listener({})
    with pytest.raises(ds.DuplicateKey, match="a Listener and a Listener both have the key 'Listener'"):
        small_trainer(tmp_path, ds.Background(first), ds.Background(second))
    seen: list[str] = []
    with ds.Background(ds.on(Event.TRAIN_END, lambda ctx: seen.append(ctx.reason))):
        small_trainer(tmp_path, max_steps=1).train()
    assert seen == ["finished"]


HANGING = """
import sys, threading
import dalsegno as ds
from dalsegno.events import background
from dalsegno.testing import TinyRegression, tiny_regression_data

background.DRAIN_TIMEOUT_S = 0.2
args = ds.TrainingArguments(sys.argv[1], max_steps=3, save_steps=0, use_cpu=True, disable_tqdm=True)
hangs = ds.Background(ds.on(ds.Event.STEP_END, lambda ctx: threading.Event().wait(), name="hangs"))
result = ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(), callbacks=[hangs]).train()
print(result.reason, hangs.counts)
"""


def test_one_that_hangs_never_keeps_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished 0 calls, 0 failed, 2 dropped"


def test_an_exception_in_the_training_is_told_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dalsegno")
    seen: list[str] = []

    def fail(ctx: Any) -> None:
        raise ValueError("the training's own")

    handlers = {name: lambda ctx, name=name: seen.append(name) for name in ("on_exception", "on_train_end")}
    observer = ds.Background(Listener(handlers, name="observer"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the training's own"):
        small_trainer(tmp_path, observer, ds.on(Event.STEP_END, fail), max_steps=3).train()
    assert seen == ["on_exception", "on_train_end"]
    assert "observer, in the background: 2 calls, 0 failed, 0 dropped" in caplog.text


def test_what_it_needs_is_needed(tmp_path: Path) -> None:
    """A loop that cannot fire an event, or a run without evaluations, refuses it as without Background."""
    counter = Listener({"on_step_end": lambda ctx: None}, name="counter")
    counter.needs_events = (Event.GRADIENTS_READY,)
    optimizer = torch.optim.SGD((model := torch.nn.Linear(1, 1)).parameters(), lr=0.1)
    with pytest.raises(ds.EventNotFired, match="counter needs on_gradients_ready"):
        ds.Run(
            ds.TrainingArguments(tmp_path, max_steps=1),
            model=model,
            optimizer=optimizer,
            loader=[torch.ones(1)],
            callbacks=[ds.Background(counter)],
        )
    judge = Listener({"on_evaluate": lambda ctx: None}, name="judge")
    judge.needs_evaluations = True
    with pytest.raises(ds.ConfigurationError, match="judge"):
        small_trainer(tmp_path, ds.Background(judge), max_steps=1).train()
