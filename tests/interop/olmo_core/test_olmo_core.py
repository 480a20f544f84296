"""Callbacks written for OLMo-core, in dalsegno's Trainer: the order, the trainer; its own where it imports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.olmo_core import Callback
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
from interop.script import Broken, play
from support.small import small_trainer

METHODS = [name for name in vars(Callback) if name.split("_")[0] in ("pre", "post", "log", "on", "close")]


def journal() -> Any:
    seen: list[Any] = []

    def note(name: str) -> Any:
        def method(self: Any, *given: Any) -> None:
            self.seen.append((name, self.step, self.trainer.epoch))

        return method

    return type("Journal", (Callback,), {"seen": seen, **{name: note(name) for name in METHODS}})()


# --- the order --------------------------------------------------------------------------------------------------------


def step(number: int, epoch: int, *logged: int) -> list[Any]:
    names = ["pre_step", "pre_optim_step", "post_train_batch", "post_step"]
    records = [(name, number, epoch) for _ in logged for name in ("pre_log_metrics", "log_metrics")]
    return [("pre_load_batch", number - 1, epoch), *((name, number, epoch) for name in names), *records]


def test_a_whole_run(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    begin = [(name, 0, 1) for name in ("post_attach", "pre_train", "pre_epoch")]
    evaluated = [("pre_log_metrics", 3, 1), ("log_metrics", 3, 1)]
    first = [*step(1, 1), *step(2, 1, 2), *step(3, 1), *evaluated, ("post_epoch", 3, 1)]
    saved = ("post_checkpoint_saved", 4, 2)
    second = [("pre_epoch", 3, 2), *step(4, 2, 4), saved, *step(5, 2), *step(6, 2, 6, 6), ("post_epoch", 6, 2)]
    end = [
        *(("post_checkpoint_saved", 6, 2), ("pre_log_metrics", 6, 2), ("log_metrics", 6, 2)),
        *(("post_train", 6, 2), ("close", 6, 2)),
    ]
    assert callback.seen == [*begin, *first, *second, *end]


def test_after_an_exception_it_is_closed(tmp_path: Path) -> None:
    callback = journal()
    with pytest.raises(Broken):
        play(tmp_path, callback, break_at=2)
    assert [name for name, _, _ in callback.seen[-2:]] == ["on_error", "close"]


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_what_nothing_stands_for_raises(tmp_path: Path) -> None:
    class Asks(Callback):
        def pre_train(self) -> None:
            for owner, name in ((self.trainer, "checkpointer"), (self.trainer.train_module, "rank_microbatch_size")):
                with pytest.raises(AttributeError, match=f"{name}: dalsegno has no counterpart of it; available: "):
                    getattr(owner, name)
            with pytest.raises(ds.UnknownName, match="record_metric: reduce_type 'avg'"):
                self.trainer.record_metric("mine", 1.0, "avg")
            path = self.trainer.write_file("notes/mine.txt", "text")
            assert self.trainer.persist_working_file("notes/mine.txt") == path and path.read_text() == "text"
            done: list[int] = []
            self.trainer.run_bookkeeping_op(lambda number: number + 1, 2, cb=done.append, op_name="add")
            assert done == [3] and self.trainer.get_callback_name(self) == "Asks" and self.trainer.has_callback(Asks)

    small_trainer(tmp_path, Asks(), max_steps=1).train()


@dataclass
class Spikes(Callback):
    """With fields, a state, and numbers of its own in records; ends the run where the loss is low enough."""

    below: float = 0.0
    losses: list[float] = field(default_factory=list)

    def pre_step(self, batch: dict[str, Any]) -> None:
        self.trainer.record_metric("rows", len(batch["x"]), namespace="batch")

    def post_step(self) -> None:
        self.losses.append(float(self.step))
        self.trainer.record_metric("steps", sum(self.losses))
        self.trainer.record_metric("twice", 1.0)
        self.trainer.record_metric("twice", 2.0, merge_strategy="sum")

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "loss" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["loss"], 20.0))

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if metrics.get("loss", math.inf) < self.below:
            self.trainer.cancel_run("the loss is low enough")

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]


def monitored(output_dir: Path) -> ds.Trainer:
    return small_trainer(output_dir, Spikes(), JsonLogger(), max_steps=12, logging_steps=3, save_steps=4)


def records(output_dir: Path) -> list[dict[str, Any]]:
    return [each for each in read_records(output_dir / "logs/train.jsonl") if "loss" in each]


def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert_resume_equivalent(monitored, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)
    found = records(tmp_path / "killed")
    assert [each["global_step"] for each in found] == [3, 6, 9, 12]
    assert [each["steps"] for each in found] == [6, 21, 45, 78]
    assert all((each["batch/rows"], each["twice"]) == (4, 3.0) for each in found)
    assert found[0]["perplexity"] == math.exp(min(found[0]["loss"], 20.0))


def test_between_steps_and_evaluations_a_metric_is_a_separate_record(tmp_path: Path) -> None:
    class Records(Callback):
        def pre_epoch(self) -> None:
            self.trainer.record_metric("begun", self.trainer.epoch)

        def post_epoch(self) -> None:
            self.trainer.record_metric("ended", self.trainer.epoch)

    parts = {"eval_dataset": tiny_regression_data(4)}
    settings = {"num_train_epochs": 2, "eval_strategy": "epoch"}
    small_trainer(tmp_path, Records(), JsonLogger(), parts=parts, length=8, **settings).train()
    found = [each for each in read_records(tmp_path / "logs/train.jsonl") if each["kind"] == "user"]
    assert [(each["global_step"], each.get("begun"), each.get("ended")) for each in found] == [
        *((0, 1, None), (2, None, 1), (2, 2, None), (4, None, 2))
    ]


def test_a_cancelled_run_is_over(tmp_path: Path) -> None:
    result = small_trainer(tmp_path, Spikes(below=1e9), max_steps=9, logging_steps=2).train()
    assert (result.global_step, result.reason, result.why) == (2, "stopped", "the loss is low enough")


def record_on_a_rank(output_dir: Path) -> None:
    class Records(Callback):
        def post_train_batch(self) -> None:
            rank = self.trainer.rank
            for reduction in ("mean", "sum", "max", "l2_norm"):
                self.trainer.record_metric(reduction, 3.0 + rank, reduction)
            self.trainer.record_metric("first", rank)
            if rank == 1:
                self.trainer.record_metric("alone", 7.0, "mean")

    small_trainer(output_dir, Records(), JsonLogger(), max_steps=1, logging_steps=1).train()


def test_metrics_are_reduced_over_the_ranks(tmp_path: Path) -> None:
    run_ranks(record_on_a_rank, 2, tmp_path)
    (record,) = records(tmp_path)
    names = ("mean", "sum", "max", "l2_norm", "first", "alone")
    assert [record[name] for name in names] == [3.5, 7.0, 4.0, 5.0, 0, 7.0]


# --- OLMo-core's own --------------------------------------------------------------------------------------------------


def test_olmo_cores_own(tmp_path: Path) -> None:
    """Where it can be imported."""
    callbacks = pytest.importorskip("olmo_core.train.callbacks")

    def train(steps: int, *others: Any) -> Any:
        names = {"loss_metric_name": "loss", "grad_norm_metric_name": "grad_norm"}
        monitor = callbacks.StabilityMonitorCallback(window_size=4, **names)
        small_trainer(tmp_path, monitor, *others, max_steps=steps, logging_steps=1, save_steps=6).train()
        return monitor

    first = train(6, callbacks.GarbageCollectorCallback())
    assert first._total_step_count > 0
    assert train(7)._total_step_count == first._total_step_count + 1
    with pytest.raises(ds.ConfigurationError, match="CheckpointerCallback needs parts of the library's own trainer"):
        ds.adapt(callbacks.CheckpointerCallback())
