"""Asked to stop from outside: at one step on all ranks, with a checkpoint, and as if nothing had been."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import dalsegno as ds
from dalsegno.checkpoint import CheckpointManager, saved_states
from dalsegno.checkpoint.listing import Summaries
from dalsegno.events.table import Event
from dalsegno.logs import RunFile, read_records
from dalsegno.system import filesystem
from dalsegno.testing import (
    FaultPlan,
    check_resume,
    compare_runs,
    run_ranks,
    tiny_regression_data,
)
from dalsegno.training import stop_requests
from support.listeners import Journal, Listener
from support.own_loops import OwnLoop
from support.small import small_trainer
from support.stopping import (
    moments,
    signal_the_group,
    stop_again_and_again,
    stoppable_trainer,
    train_to,
)

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


def raise_at(number: signal.Signals, handler: str, count: int, name: str = "sender") -> ds.Callback:
    """Sends this process a signal when the handler is called for the ``count``-th time."""
    left = iter(range(count - 1, -1, -1))

    def send(ctx: Any) -> None:
        if next(left, None) == 0:
            signal.raise_signal(number)

    return Listener({handler: send}, name=name)


@contextmanager
def handled_by(number: signal.Signals, handler: Any) -> Iterator[None]:
    """As a program would have it that has set a handler of its own."""
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


def assert_same(one: Path, other: Path) -> None:
    comparison = compare_runs(one, other)
    assert comparison.identical, f"\n{comparison.table()}"


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_leg_at_its_steps_end_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    trainer = small_trainer(tmp_path, raise_at(number, "on_after_backward", 3), max_steps=6, save_steps=100)
    result = trainer.train()
    assert (result.global_step, result.reason, result.why, result.stopped_by) == (3, "stopped", number.name, "signal")
    assert result.checkpoint == tmp_path / "checkpoints/step-00000003"
    assert RunFile(tmp_path).load().legs[-1].by == "signal"
    assert [signal.getsignal(each) for each in SIGNALS] == before
    again = trainer.train()
    assert (again.global_step, again.reason, again.stopped_by) == (6, "finished", None), "no flag of the first sticks"


def test_two_sigterms_are_as_good_as_one(tmp_path: Path) -> None:
    """Slurm signals every process of a job, and torchrun hands on what it is sent."""
    first, second = (raise_at(signal.SIGTERM, "on_after_backward", 3, name) for name in ("first", "second"))
    result = small_trainer(tmp_path, first, second, max_steps=6).train()
    assert (result.global_step, result.reason) == (3, "stopped")


def test_a_handler_of_the_programs_own_is_called_when_all_is_saved(tmp_path: Path) -> None:
    """One that exits, or puts the job back into the queue."""

    def leave(number: int, frame: object) -> None:
        assert CheckpointManager(tmp_path).find().step == 3
        assert RunFile(tmp_path).load().legs[-1].reason == "stopped"
        raise SystemExit(85)

    sender = raise_at(signal.SIGUSR1, "on_after_backward", 3)
    with handled_by(signal.SIGUSR1, leave), pytest.raises(SystemExit) as caught:
        small_trainer(tmp_path, sender, max_steps=6).train()
    assert caught.value.code == 85


def test_what_the_program_ignores_stays_ignored(tmp_path: Path) -> None:
    """As under ``nohup``, or in the background of a shell."""
    with handled_by(signal.SIGINT, signal.SIG_IGN):
        result = small_trainer(tmp_path, raise_at(signal.SIGINT, "on_after_backward", 3), max_steps=6).train()
    assert (result.global_step, result.reason) == (6, "finished")


def test_a_handler_that_is_set_during_the_training_is_left_alone(tmp_path: Path) -> None:
    def set_another(ctx: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    former = signal.getsignal(signal.SIGUSR1)
    try:
        small_trainer(tmp_path, Listener({"on_step_end": set_another}), max_steps=1).train()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_on_another_thread_signals_are_not_ours(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = Listener({"on_step_end": lambda ctx: seen.append(signal.getsignal(signal.SIGTERM))})
    trainer = small_trainer(tmp_path, look, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("handler", ["on_before_load", "on_train_begin"])
def test_before_anything_is_done_there_is_nothing_to_save(tmp_path: Path, handler: str) -> None:
    trainer = small_trainer(tmp_path, raise_at(signal.SIGTERM, handler, 1), max_steps=6, save_steps=2)
    result = trainer.train()
    assert (result.global_step, result.reason, result.stopped_by) == (0, "stopped", "signal")
    assert result.checkpoint is None
    assert trainer.train().reason == "finished"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_workers_of_a_loader_outlive_a_signal_to_the_group(tmp_path: Path, number: signal.Signals) -> None:
    assert run_ranks(signal_the_group, 1, tmp_path, number) == [(3, "stopped", number.name, "signal")]


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_a_leg_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from one look at the clock to the next."""
    monkeypatch.setattr(stop_requests, "time", SimpleNamespace(monotonic=itertools.count(1000).__next__))
    trainer = small_trainer(tmp_path, max_steps=1_000_000, max_seconds=20, num_train_epochs=1)
    first = trainer.train()
    assert 0 < first.global_step <= 20
    assert (first.reason, first.why, first.stopped_by) == ("stopped", "max_seconds=20", "clock")
    assert first.checkpoint is not None
    second = trainer.train()
    assert second.global_step > first.global_step, "each leg has its own time"


def test_a_leg_ends_before_slurm_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from one look at the clock to the next."""
    clock = SimpleNamespace(monotonic=itertools.count(1000).__next__, time=lambda: 1_800_000_000.0)
    monkeypatch.setattr(stop_requests, "time", clock)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800000020")
    result = small_trainer(tmp_path / "soon", max_steps=100).train()
    assert (result.reason, result.stopped_by) == ("stopped", "clock")
    assert result.why == "Slurm ends this job in 3 s", "one for a step, and a tenth of the twenty to leave in"
    assert 0 < result.global_step <= 17
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800000500")
    assert small_trainer(tmp_path / "later", max_steps=4).train().reason == "finished"


@pytest.mark.parametrize("announced", ["17", "tomorrow"])
def test_an_end_that_cannot_be_true_is_said_and_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, announced: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", announced)
    assert small_trainer(tmp_path, max_steps=4).train().reason == "finished"
    assert "the end of the job is ignored" in caplog.text


# --- evaluation -------------------------------------------------------------------------------------------------------


EVALUATIONS = {
    "first set": ("on_prediction_step", 3),
    "second set": ("on_prediction_step", 9),
    "before the second": ("on_evaluate", 1),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_that_is_broken_off_is_the_next_legs_first_deed(tmp_path: Path, name: str) -> None:
    handler, count = EVALUATIONS[name]
    settings = {"max_steps": 40, "load_best_model_at_end": True}
    stoppable_trainer(tmp_path / "whole", **settings).train()
    sender = raise_at(signal.SIGTERM, handler, count)
    stopped = stoppable_trainer(tmp_path / "parts", sender, **settings).train()
    assert (stopped.reason, stopped.stopped_by) == ("stopped", "signal")
    owed = saved_states(CheckpointManager(tmp_path / "parts").find())["trainer"][0]["evaluations_owed"]
    assert owed == (["far"] if "second" in name else ["near", "far"])
    order = Journal()
    result = stoppable_trainer(tmp_path / "parts", order, **settings).train()
    assert result.reason == "finished"
    assert order.fired[order.fired.index("train_begin") + 1] == "evaluate_begin"
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert best_flags(tmp_path / "whole") == best_flags(tmp_path / "parts")


def test_the_evaluation_of_the_last_step(tmp_path: Path) -> None:
    """Its checkpoint owes the evaluation still, and tells its metrics; logs and result have it as the unbroken run."""
    whole = stoppable_trainer(tmp_path / "whole", max_steps=8).train()
    sender = raise_at(signal.SIGTERM, "on_prediction_step", 12 + 3)
    assert stoppable_trainer(tmp_path / "parts", sender, max_steps=8).train().reason == "stopped"
    result = stoppable_trainer(tmp_path / "parts", max_steps=8).train()
    assert (result.global_step, result.reason, result.metrics["train_loss"]) == (
        8,
        "finished",
        whole.metrics["train_loss"],
    )
    rows = [row for row in compare_runs(tmp_path / "whole", tmp_path / "parts").rows if row.what.startswith("logs/")]
    assert len(rows) == 2 and all(row.identical for row in rows), rows
    assert best_flags(tmp_path / "whole") == best_flags(tmp_path / "parts")
    trainer = stoppable_trainer(tmp_path / "parts", max_steps=8)
    assert trainer.train().global_step == 8, "finished is finished"
    assert len(RunFile(tmp_path / "parts").load().legs) == 2


def test_a_run_that_goes_on_behind_that_evaluation(tmp_path: Path) -> None:
    """Its last checkpoint was taken before it, says that it is owed, and is what the longer run goes on from."""
    for folder, senders in {"whole": [], "parts": [raise_at(signal.SIGTERM, "on_prediction_step", 12 + 3)]}.items():
        for sender in [*senders, None]:
            stoppable_trainer(tmp_path / folder, *([sender] if sender else []), max_steps=8).train()
        assert stoppable_trainer(tmp_path / folder, max_steps=20).train().reason == "finished"
    assert_same(tmp_path / "whole", tmp_path / "parts")


def best_flags(output_dir: Path) -> dict[int, tuple[bool, float]]:
    entries = Summaries().of(output_dir / "checkpoints")
    return {entry.step: (entry.best, entry.metrics["eval_near_loss"]) for entry in entries}


def test_an_evaluation_is_begun_anew_as_often_as_it_is_broken_off(tmp_path: Path) -> None:
    """And its checkpoint stays one checkpoint."""
    stoppable_trainer(tmp_path / "whole", max_steps=20).train()
    for count in (3, 5, 1):
        sender = raise_at(signal.SIGTERM, "on_prediction_step", count)
        assert stoppable_trainer(tmp_path / "parts", sender, max_steps=20).train().global_step == 4
    stoppable_trainer(tmp_path / "parts", max_steps=20).train()
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_what_a_callback_requests_in_an_evaluation_waits_for_its_end(tmp_path: Path) -> None:
    stop = Listener({"on_prediction_step": lambda ctx: ctx.control.stop("seen enough")})
    result = stoppable_trainer(tmp_path, stop, max_steps=20).train()
    assert (result.global_step, result.why) == (4, "seen enough")
    kinds = [record.get("kind") for record in read_records(tmp_path / "logs/train.jsonl")]
    assert kinds.count("eval") == 2


class Loop(OwnLoop):
    """Its evaluation can be left between two batches."""

    def __init__(self, output_dir: Path, *callbacks: ds.Callback, ask: Callable[[], None] = lambda: None) -> None:
        super().__init__(output_dir, *callbacks)
        self.ask = ask

    def run(self) -> ds.Run:
        self.current = super().run()
        return self.current

    def evaluate(self) -> dict[str, float]:
        for _ in range(3):
            self.current.between_batches()
            self.ask()
        return super().evaluate()


def test_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").train()
    stopped = Loop(tmp_path / "parts", ask=lambda: signal.raise_signal(signal.SIGTERM)).train()
    assert whole is not None and stopped is not None
    assert (stopped.global_step, stopped.reason, stopped.stopped_by) == (10, "stopped", "signal")
    Loop(tmp_path / "parts").train()
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_stop_can_be_tried_as_a_kill_can(tmp_path: Path) -> None:
    """By whoever has a callback of their own, as docs/guides/testing.md says."""
    lines: list[str] = []
    plans = [
        FaultPlan(event=Event.AFTER_FORWARD, count=24, sends=signal.SIGTERM),
        FaultPlan(event=Event.STEP_END, count=7),
    ]
    assert check_resume(stoppable_trainer, plans, folder=tmp_path, say=lines.append).identical
    assert lines[1:3] == ["killed by SIGTERM at on_after_forward no. 24", "killed at on_step_end no. 7"]


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False], ids=["each step", "by the clock"])
def test_sigterm_to_one_rank_of_two_at_random_instants(tmp_path: Path, quick: bool) -> None:
    """Every other moment each, so that both together have tried every kind."""
    plans = moments(2026)[quick::2]
    first, second = run_ranks(stop_again_and_again, 2, tmp_path / "parts", plans, quick)
    assert first == second, "all ranks stop at one step, and for one reason"
    assert {end[1:4] for end in first} == {("stopped", "SIGTERM", "signal")}
    steps = first[-1][0] + 9
    run_ranks(train_to, 2, tmp_path / "parts", steps, quick)
    run_ranks(train_to, 2, tmp_path / "whole", steps, quick)
    assert_same(tmp_path / "whole", tmp_path / "parts")


# --- what is measured after it was saved ------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    """Twenty samples, and nobody knows before that these are all: the epoch's end comes after its last step's."""

    def __iter__(self) -> Iterator[Any]:
        data = tiny_regression_data(20)
        return (data[index] for index in range(20))


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_before_the_evaluation_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """It is told what came out, if it is there: a save that failed has lost nothing else."""

    def watch(operation: str, path: Path) -> None:
        if fails and operation == "write" and "step-00000005.partial" in str(path):
            raise OSError("no disk today")

    monkeypatch.setattr(filesystem, "watcher", watch)
    parts = {"train_dataset": Endless(), "eval_dataset": tiny_regression_data(8, seed=1)}
    trainer = small_trainer(tmp_path, parts=parts, max_steps=10, save_steps=5, eval_strategy="epoch", eval_steps=500)
    assert trainer.train().reason == "finished"
    measured = {entry.step: "eval_loss" in entry.metrics for entry in Summaries().of(tmp_path / "checkpoints")}
    assert measured == ({10: False} if fails else {5: True, 10: False})
    assert trainer.state.best_global_step == 5
