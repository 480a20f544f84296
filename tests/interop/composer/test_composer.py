"""Callbacks written for Composer, in dalsegno's Trainer: the order, the state, the logger; its own where it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.composer import Callback, Event, Time
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, tiny_regression_data
from interop.script import Broken, play
from support.small import Line, small_trainer


class Journal(Callback):
    """By the one method that gets every event."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        at = state.timestamp
        self.seen.append((event.value, int(at.epoch), int(at.batch), int(at.batch_in_epoch), state.dataloader_label))
        super().run_event(event, state, logger)

    def close(self, state: Any, logger: Any) -> None:
        self.seen.append("close")

    def post_close(self) -> None:
        self.seen.append("post_close")


# --- the order --------------------------------------------------------------------------------------------------------

MICROBATCH = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]


def step(epoch: int, number: int, in_epoch: int, microbatches: int) -> list[Any]:
    before = [
        *("before_dataloader", "after_dataloader", "batch_start", "before_train_batch"),
        *(MICROBATCH * microbatches),
        "after_train_batch",
    ]
    calls = [(name, epoch, number, in_epoch, "train") for name in before]
    return [*calls, ("batch_end", epoch, number + 1, in_epoch + 1, "train")]


def evaluation(epoch: int, number: int, in_epoch: int) -> list[Any]:
    batch = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]
    names = ["eval_before_all", "eval_start", *batch, *batch, "eval_end", "eval_after_all"]
    return [(name, epoch, number, in_epoch, "eval") for name in names]


def done(epoch: int, number: int, in_epoch: int, label: str = "train") -> tuple[Any, ...]:
    return ("batch_checkpoint", epoch, number, in_epoch, label)


def test_a_whole_run(tmp_path: Path) -> None:
    callback = Journal()
    play(tmp_path, callback)
    first = [
        *(*step(0, 0, 0, 2), done(0, 1, 1), *step(0, 1, 1, 2), done(0, 2, 2)),
        *(*step(0, 2, 2, 1), *evaluation(0, 3, 3), done(0, 3, 3)),
        *(("epoch_end", 1, 3, 3, "train"), ("epoch_checkpoint", 1, 3, 3, "train")),
    ]
    second = [
        *(*step(1, 3, 0, 2), done(1, 4, 1), *step(1, 4, 1, 2), done(1, 5, 2)),
        *(*step(1, 5, 2, 1), *evaluation(1, 6, 3), done(1, 6, 3)),
        *(("epoch_end", 2, 6, 3, "train"), ("epoch_checkpoint", 2, 6, 3, "train")),
    ]
    begin = [(name, 0, 0, 0, "train") for name in ("init", "before_load", "fit_start", "epoch_start")]
    end = [("fit_end", 2, 6, 3, "train"), "close", "post_close"]
    assert callback.seen == [*begin, *first, ("epoch_start", 1, 3, 0, "train"), *second, *end]


def test_after_an_exception_it_is_closed(tmp_path: Path) -> None:
    callback = Journal()
    with pytest.raises(Broken):
        play(tmp_path, callback, break_at=1)
    assert callback.seen[-2:] == ["close", "post_close"]


def test_every_event_of_the_base_class_is_called_at_some_time(tmp_path: Path) -> None:
    callback = Journal()
    play(tmp_path, callback)
    play(tmp_path, callback)
    trainer = small_trainer(tmp_path / "alone", callback, parts={"eval_dataset": tiny_regression_data(4)}, max_steps=1)
    trainer.evaluate()
    args = {"num_train_epochs": 3}
    play(tmp_path, again := Journal(), **args)
    called = {call[0] for call in [*callback.seen, *again.seen] if isinstance(call, tuple)}
    assert called == {event.value for event in Event}


# --- state and logger -------------------------------------------------------------------------------------------------


def test_times() -> None:
    assert all(Time(5, "ba") == same for same in (Time.from_timestring("5ba"), "5ba", 5))
    assert Time(5, "ba") > Time(4, "ba") and Time(1, "ep") <= 1 and Time(2, "ep") + 1 == Time(3, "ep")
    assert (
        (Time(6, "ba") / Time(12, "ba")) == Time(0.5, "dur")
        and Time(6, "ba") % 4 == 2
        and str(Time(3, "tok")) == "3tok"
    )
    with pytest.raises(RuntimeError, match="5ba and 5ep have different units"):
        assert Time(5, "ba") > Time(5, "ep")
    with pytest.raises(ValueError, match="'soon' is not a time"):
        Time.from_timestring("soon")


def test_what_nothing_stands_for_raises(tmp_path: Path) -> None:
    class Asks(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            for owner, name in ((state, "scaler"), (logger, "log_images"), (logger, "upload_file")):
                with pytest.raises(AttributeError, match=f"{name}: dalsegno has no counterpart of it; available: "):
                    getattr(owner, name)
            assert float(state.loss) > 0 and state.max_duration == "2ba"
            assert state.get_elapsed_duration().value == int(state.timestamp.batch) / 2
            assert state.batch_get_item("x").shape == (4, 8)

    small_trainer(tmp_path, Asks(), max_steps=2).train()


class Stopper(Callback):
    """Composer's own EarlyStopper in small, with a state."""

    def __init__(self, patience: int) -> None:
        self.patience, self.bad, self.best = patience, 0, float("inf")

    def eval_end(self, state: Any, logger: Any) -> None:
        loss = float(state.eval_metrics[state.dataloader_label]["loss"].compute())
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        logger.log_metrics({"bad": self.bad})
        if self.bad >= self.patience:
            state.stop_training()

    def state_dict(self) -> dict[str, Any]:
        return {"bad": self.bad, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad, self.best = state["bad"], state["best"]


def test_a_stop_over_two_legs_ends_the_run(tmp_path: Path) -> None:
    def run(steps: int) -> ds.TrainResult:
        parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
        settings = {"max_steps": steps, "eval_steps": 2, "save_steps": 4, "learning_rate": 0.0}
        return small_trainer(tmp_path, Stopper(3), model=Line(), parts=parts, **settings).train()

    run(4)
    result = run(20)
    assert (result.global_step, result.reason, result.stopped_by) == (8, "stopped", "Stopper")
    assert result.why == "it called state.stop_training()"


class Rates(Callback):
    """As Composer's LRMonitor: it logs in every step, and knows nothing of records."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.samples.append(state.timestamp.sample_in_epoch.value)
        logger.log_metrics({"rate": state.optimizers[0].param_groups[0]["lr"], "samples": sum(self.samples)})

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def monitored(output_dir: Path) -> ds.Trainer:
    return small_trainer(output_dir, Rates(), JsonLogger(), max_steps=12, logging_steps=3, save_steps=4, length=28)


def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert_resume_equivalent(monitored, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)
    records = [each for each in read_records(tmp_path / "killed/logs/train.jsonl") if "rate" in each]
    assert [each["global_step"] for each in records] == [3, 6, 9, 12]
    assert records[-1]["samples"] == 4 * (sum(range(1, 8)) + sum(range(1, 6)))


# --- Composer's own ---------------------------------------------------------------------------------------------------


def test_composers_own(tmp_path: Path) -> None:
    """Where it can be imported: it pins another torch than dalsegno's."""
    callbacks_of_composer = pytest.importorskip("composer.callbacks")
    stopper = callbacks_of_composer.EarlyStopper("loss", "eval", patience="3ba")
    callbacks = [callbacks_of_composer.LRMonitor(), callbacks_of_composer.NaNMonitor(), stopper, JsonLogger()]
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    settings = {"max_steps": 20, "eval_steps": 2, "logging_steps": 1, "learning_rate": 0.0}
    result = small_trainer(tmp_path, *callbacks, model=Line(), parts=parts, **settings).train()
    assert (result.global_step, result.stopped_by) == (6, "EarlyStopper")
    records = [each for each in read_records(tmp_path / "logs/train.jsonl") if "loss" in each]
    assert all(each["lr-AdamW/group0"] == 0.0 for each in records)
    with pytest.raises(ds.ConfigurationError, match="CheckpointSaver needs parts of the library's own trainer"):
        ds.adapt(callbacks_of_composer.CheckpointSaver())
