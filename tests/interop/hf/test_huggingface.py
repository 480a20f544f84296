"""Hugging Face's dialect, and Forgather's: the order, what handlers are given, what they may change, state."""

from __future__ import annotations

import dataclasses
import json
import pprint
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dalsegno as ds
from dalsegno.testing import FaultPlan, assert_resume_equivalent, tiny_regression_data
from interop.script import Broken, play
from support.held_saves import hold_save
from support.listeners import Listener
from support.parcels import sent
from support.small import small_trainer

PLAIN = ["model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"]
NAMES = [name for name in dir(ds.TrainerCallback) if name.startswith("on_")]


class Recorder(ds.TrainerCallback):
    """Every event with its step; and all that it was called with."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.seen: list[tuple[str, int]] = []
        self.calls: dict[str, dict[str, Any]] = {}
        for name in NAMES:
            if name.removeprefix("on_") not in without:
                setattr(self, name, self._entry(name.removeprefix("on_")))

    def _entry(self, name: str) -> Any:
        def write(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((name, state.global_step))
            self.calls[name] = kwargs

        return write


# --- the order --------------------------------------------------------------------------------------------------------

PASS = ["forward_backward_begin", "forward_backward_end"]
SUBSTEP = [*PASS, "substep_end"]
UPDATE = ["pre_optimizer_step", "optimizer_step"]
RECORD = ["log_step", "log"]
EVALUATION = ["prediction_step", "prediction_step", *RECORD, "evaluate"]


def step(number: int, substeps: int, *boundary: str) -> list[tuple[str, int]]:
    update = ["step_begin", *SUBSTEP * substeps, *PASS, *UPDATE]
    return [(name, number - 1) for name in update] + [
        (name, number) for name in ["step_end", "train_metrics", *boundary]
    ]


BEGIN = [("init_end", 0), ("train_begin", 0), ("epoch_begin", 0)]
FIRST_EPOCH = [*step(1, 1), *step(2, 1, *RECORD), *step(3, 0, *EVALUATION), ("epoch_end", 3)]
SECOND_EPOCH = [("epoch_begin", 3), *step(4, 1, *RECORD, "save"), *step(5, 1), *step(6, 0, *RECORD, *EVALUATION)]
END = [("epoch_end", 6), ("save", 6), ("log_step", 6), ("log", 6), ("train_end", 6)]


def test_a_whole_run(tmp_path: Path) -> None:
    recorder = Recorder()
    play(tmp_path, recorder)
    assert recorder.seen == [*BEGIN, *FIRST_EPOCH, *SECOND_EPOCH, *END]


def test_a_run_that_is_stopped_inside_an_epoch(tmp_path: Path) -> None:
    recorder = Recorder()
    play(tmp_path, recorder, stop_at=2)
    end = [("epoch_end", 2), ("log_step", 2), ("log", 2), ("train_end", 2)]
    assert recorder.seen == [*BEGIN, *step(1, 1), *step(2, 1, *RECORD, "save"), *end]


def test_an_exception_is_followed_by_the_end_of_training(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(Broken):
        play(tmp_path, recorder, break_at=2)
    cut = [(name, 1) for name in ["step_begin", *SUBSTEP, *PASS, "train_end"]]
    assert recorder.seen == [*BEGIN, *step(1, 1), *cut]


def test_a_leg_that_begins_inside_an_epoch_begins_it(tmp_path: Path) -> None:
    play(tmp_path, Recorder(), stop_at=4)
    recorder = Recorder()
    play(tmp_path, recorder)
    begin = [("init_end", 0), ("train_begin", 4), ("epoch_begin", 4), ("save", 4)]
    assert recorder.seen == [*begin, *step(5, 1), *step(6, 0, *RECORD, *EVALUATION), *END]


# --- what they are given ----------------------------------------------------------------------------------------------


def test_keywords_are_theirs(tmp_path: Path) -> None:
    recorder = Recorder()
    play(tmp_path, recorder)
    of_step = ["metrics", "loss", "grad_norm", "tokens"]
    added = {"log": ["logs"], "log_step": ["logs"], "evaluate": ["metrics"], "train_metrics": of_step}
    for name, kwargs in recorder.calls.items():
        assert sorted(kwargs) == sorted([*PLAIN, "trainer", *added.get(name, [])]), name
    given = recorder.calls["step_end"]
    assert (len(given["train_dataloader"]), len(given["eval_dataloader"])) == (5, 2)
    with pytest.raises(TypeError, match="cannot read the training data"):
        iter(given["train_dataloader"])


def test_those_of_forgather_are_given_the_trainer(tmp_path: Path) -> None:
    from forgather.ml.trainer.trainer_types import TrainerCallback

    trainers: list[Any] = []

    class Own(TrainerCallback):  # type: ignore[misc]
        name = "first"

        def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainers.append((kwargs["trainer"], kwargs["loss"]))

    class Theirs:
        def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, tokenizer: Any, **kwargs: Any) -> None:
            trainers.append((trainer, tokenizer))

    class Ours(ds.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainers.append((kwargs["trainer"], None))

    assert ds.adapt(Own()).key == "first"
    parts = {"processing_class": "a tokenizer"}
    trainer = small_trainer(tmp_path, Own(), Theirs(), max_steps=1, parts=parts)
    trainer.add_callback(Ours())
    trainer.train()
    assert [each for each, _ in trainers] == [trainer] * 3
    assert trainers[0][1] == "a tokenizer" and trainers[1][1] > 0


def test_the_dialect_is_seen_from_the_parameters() -> None:
    class Plain:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    assert ds.adapt(Plain()).handled_events() == [ds.Event.STEP_END]


def test_their_base_class_is_named_after_itself() -> None:
    assert ds.TrainerCallback().name == "TrainerCallback"


def test_each_evaluation_set_has_its_own_loader(tmp_path: Path) -> None:
    seen: list[tuple[int, list[str]]] = []

    class Note(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((len(kwargs["eval_dataloader"]), sorted(kwargs["metrics"])[:1]))

    sets = {"big": tiny_regression_data(40, seed=1), "small": tiny_regression_data(8, seed=2)}
    small_trainer(tmp_path, Note(), max_steps=1, eval_steps=1, parts={"eval_dataset": sets}).train()
    assert [length for length, _ in seen] == [5, 1]


def test_what_is_evaluated_on_can_be_read(tmp_path: Path) -> None:
    losses: list[float] = []

    class Measure(ds.TrainerCallback):
        def on_evaluate(
            self, args: Any, state: Any, control: Any, *, metrics: Any, model: Any, eval_dataloader: Any, **kwargs: Any
        ) -> None:
            with torch.no_grad():
                own = [float(model.eval()(**batch)) for batch in eval_dataloader]
            model.train()
            losses.extend([metrics["eval_loss"], sum(own) / len(own)])

    sets = {"eval_dataset": tiny_regression_data(16, seed=1)}
    small_trainer(tmp_path, Measure(), max_steps=1, eval_steps=1, parts=sets).train()
    assert losses[0] == pytest.approx(losses[1])


def captured(output_dir: Path, event: str, **settings: Any) -> tuple[Any, Any, Any]:
    """args, state and control of the last such event."""
    kept: list[tuple[Any, Any, Any]] = []

    class Keep(ds.TrainerCallback): ...

    setattr(Keep, event, lambda self, args, state, control, **kwargs: kept.append((args, state, control)))
    play(output_dir, Keep(), **settings)
    return kept[-1]


def test_arguments_have_their_names(tmp_path: Path) -> None:
    args, _, _ = captured(tmp_path, "on_train_begin", run_name="one", save_strategy="epoch", logging_steps=0)
    assert (args.output_dir, args.run_name) == (str(tmp_path), "one")
    assert Path(args.logging_dir).parent == tmp_path / "runs"
    assert (args.eval_strategy, args.save_strategy, args.logging_strategy) == ("steps", "epoch", "no")
    assert (args.save_strategy.value, args.eval_steps, args.logging_steps) == ("epoch", 3, sys.maxsize)
    assert (args.world_size, args.process_index, args.local_rank, args.n_gpu, str(args.device)) == (1, 0, 0, 0, "cpu")
    assert (args.report_to, args.push_to_hub, args.should_save, args.do_eval) == ([], False, True, True)
    assert args.learning_rate == 0.01, "ours are there, too"
    assert json.loads(args.to_json_string())["save_strategy"] == "epoch"
    assert {type(value) for value in args.to_sanitized_dict().values()} <= {
        bool,
        int,
        float,
        str,
        type(args.eval_strategy),
    }
    assert args.deepspeed is None
    with pytest.raises(AttributeError, match=r"dalsegno has no counterpart of args\.flux_capacitor"):
        _ = args.flux_capacitor


def test_arguments_are_printed_and_copied_as_a_dataclass(tmp_path: Path) -> None:
    args, _, _ = captured(tmp_path, "on_train_begin", run_name="one")
    names = {field.name for field in dataclasses.fields(args)}
    assert names == args.to_dict().keys()
    assert dataclasses.asdict(args)["run_name"] == "one"
    assert "run_name='one'" in pprint.pformat(args)
    other = dataclasses.replace(args, run_name="two", gradient_accumulation_steps=7)
    assert (other.run_name, other.gradient_accumulation_steps, other.learning_rate) == ("two", 7, args.learning_rate)
    assert (args.run_name, other.device, other.n_gpu, other.deepspeed) == ("one", args.device, 0, None)
    assert other.to_dict().keys() == args.to_dict().keys()


def test_accumulation_steps_are_those_of_the_step(tmp_path: Path) -> None:
    counts: list[int] = []

    class Note(ds.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            counts.append(args.gradient_accumulation_steps)

    small_trainer(tmp_path, Note(), max_steps=7, length=56, gradient_accumulation_schedule={0: 1, 2: 2, 5: 3}).train()
    assert counts == [1, 1, 2, 2, 2, 3, 3]


def test_without_data_to_evaluate_on_there_is_no_evaluation(tmp_path: Path) -> None:
    seen: list[str] = []

    class Note(ds.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.eval_strategy)

    small_trainer(tmp_path, Note(), max_steps=1, eval_steps=1).train()
    assert seen == ["no"]


def test_the_state_has_their_fields(tmp_path: Path) -> None:
    _, state, _ = captured(tmp_path / "run", "on_train_end")
    assert (state.global_step, state.max_steps, state.num_train_epochs, state.epoch) == (6, 6, 2, 2.0)
    assert (state.is_hyper_param_search, state.trial_name, state.trial_params, state.stateful_callbacks) == (
        False,
        None,
        None,
        {},
    )
    assert state.best_metric is not None
    assert [record["step"] for record in state.log_history] == [2, 3, 4, 6, 6, 6]
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    theirs = pytest.importorskip("transformers").TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert theirs.log_history == state.log_history
    state.compute_steps(type("Args", (), {"logging_steps": 0.5, "eval_steps": 3, "save_steps": None}), 9)
    assert (state.logging_steps, state.eval_steps) == (5, 3)


def test_what_is_set_in_the_state_is_the_runs(tmp_path: Path) -> None:
    class Count(ds.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.total_flos += 100.0
            state.own = state.global_step

    totals: list[float] = []
    play(tmp_path, Count(), Listener({"on_train_end": lambda ctx: totals.append(ctx.state.total_flos)}))
    assert totals == [600.0]


def test_a_lower_number_of_steps_in_the_state_ends_the_run(tmp_path: Path) -> None:
    class Shorter(ds.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.max_steps = 3

    result = small_trainer(tmp_path, Shorter(), max_steps=6, save_steps=10).train()
    assert (result.reason, result.global_step, result.stopped_by) == ("stopped", 3, "huggingface")
    assert result.why == "a callback has set state.max_steps to 3"
    assert result.checkpoint is not None


def test_arguments_and_state_show_what_they_are(tmp_path: Path) -> None:
    args, state, _ = captured(tmp_path, "on_train_end")
    assert repr(args).startswith("TrainingArguments(") and f"output_dir={str(tmp_path)!r}" in repr(args)
    assert repr(state).startswith("TrainerState(epoch=2.0, global_step=6, max_steps=6, ")


def test_logs_are_a_copy_and_log_step_adds_to_them(tmp_path: Path) -> None:
    written: list[dict[str, Any]] = []

    class Greedy(ds.TrainerCallback):
        def on_log_step(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> None:
            logs["added"] = state.global_step

        def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> None:
            assert logs["epoch"] == state.epoch
            logs.clear()

    play(tmp_path, Greedy(), Listener({"on_log": lambda ctx: written.append(dict(ctx.logs))}))
    assert [record["added"] for record in written] == [2, 3, 4, 6, 6, 6]
    assert all(len(record) > 1 for record in written)


# --- the control ------------------------------------------------------------------------------------------------------


class Flags:
    """A control that a callback makes itself, as theirs is a dataclass to be replaced."""

    def __init__(self, **flags: bool) -> None:
        names = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
        vars(self).update(dict.fromkeys(names, False) | flags)


def test_a_returned_control_is_taken_over_and_cleared(tmp_path: Path) -> None:
    seen: list[tuple[str, int, bool]] = []

    class Requester(ds.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return Flags(should_evaluate=True, should_save=True) if state.global_step == 1 else None

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("evaluate", state.global_step, control.should_evaluate))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("save", state.global_step, control.should_save))

    play(tmp_path, Requester())
    done = [("evaluate", 1), ("save", 1), ("evaluate", 3), ("save", 4), ("evaluate", 6), ("save", 6)]
    assert seen == [(*each, False) for each in done]


def test_who_stops_is_known(tmp_path: Path) -> None:
    class Enough(ds.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True
            return control

    result = play(tmp_path, Enough())
    assert (result.global_step, result.reason, result.stopped_by) == (2, "stopped", "Enough")


def test_a_checkpoint_written_in_the_background_is_told_with_its_own_step(tmp_path: Path) -> None:
    steps: list[int] = []

    class Note(ds.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    small_trainer(tmp_path, Note(), max_steps=9, save_steps=4, save_in_background=True).train()
    assert steps == [4, 8, 9]


def test_what_is_known_of_a_checkpoint_written_in_the_background_is_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Note(ds.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(
                (state.global_step, state.epoch, state.samples_seen, [each["step"] for each in state.log_history])
            )

    small_trainer(
        tmp_path, hold_save(monkeypatch, 4, until=7), Note(), max_steps=8, save_steps=4, logging_steps=2
    ).train()
    assert seen[0] == (4, 0.8, 16, [2, 4])


# --- state ------------------------------------------------------------------------------------------------------------


class Epochs(ds.TrainerCallback):
    """A callback with state receives each epoch once, in whichever leg."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["begin", state.global_step])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["history", len(state.log_history)])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(["end", state.global_step])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def with_epochs(output_dir: Path) -> ds.Trainer:
    return small_trainer(output_dir, Epochs(), Recorder(), max_steps=12, logging_steps=1, save_steps=2)


def test_state_and_history_survive_a_kill(tmp_path: Path) -> None:
    assert_resume_equivalent(with_epochs, [FaultPlan(event=ds.Event.STEP_END, count=9)], folder=tmp_path)


class Exported(ds.TrainerCallback):
    """Says itself how it is made from its state."""

    def __init__(self, limit: int, count: int = 0) -> None:
        self.limit, self.count = limit, count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, int]:
        return {"limit": self.limit, "count": self.count}

    @classmethod
    def from_state(cls, state: dict[str, int]) -> Exported:
        return cls(**state)


def test_an_exported_state_comes_back_into_the_same_object(tmp_path: Path) -> None:
    small_trainer(tmp_path, Exported(5), max_steps=3, save_steps=3).train()
    again = Exported(7)
    small_trainer(tmp_path, again, max_steps=4, save_steps=4).train()
    assert (again.count, again.limit) == (4, 5)


# --- in the background ------------------------------------------------------------------------------------------------


def test_in_the_background(tmp_path: Path) -> None:
    go_on = threading.Event()
    seen: list[tuple[int, int]] = []

    class Observer(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert go_on.wait(60)
            seen.append((state.global_step, len(state.log_history)))

    release = Listener({"on_train_end": lambda ctx: go_on.set()})
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    small_trainer(tmp_path, release, ds.Background(Observer()), max_steps=4, eval_steps=2, parts=parts).train()
    assert seen == [(2, 1), (4, 3)], "the final record is of the same step"


class Logger(ds.TrainerCallback):
    """Puts a tensor into the records."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> None:
        logs["own"] = self.value


def test_a_tensor_in_a_record_is_a_number_or_refused_there_naming_the_callback(tmp_path: Path) -> None:
    single = Logger(torch.ones(1))
    small_trainer(tmp_path / "one", single, max_steps=4, logging_steps=1, save_steps=2).train()
    assert small_trainer(tmp_path / "one", single, max_steps=6, logging_steps=1).train().global_step == 6
    trainer = small_trainer(tmp_path / "three", Logger(torch.ones(3)), max_steps=4, logging_steps=1, save_steps=2)
    with pytest.raises(ds.CannotSave, match=r"record key 'own': a tensor of shape \(3,\), logged by Logger; log a"):
        trainer.train()
    assert trainer.state.global_step == 1


# --- to other processes -----------------------------------------------------------------------------------------------


class Foreign:
    """Of no base class."""

    def __init__(self) -> None:
        self.seen = [1]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("kind", [int, np.float32, np.float64, np.int64, torch.tensor])
def test_a_number_of_any_kind_selects_the_best_model(kind: Any, tmp_path: Path) -> None:
    class Adds(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> None:
            metrics |= {"eval_score": kind(state.global_step), "eval_is_good": True, "eval_rows": torch.ones(2)}

    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    best = {"metric_for_best_model": "eval_score", "greater_is_better": True}
    trainer = small_trainer(tmp_path, Adds(), parts=parts, max_steps=2, eval_steps=1, **best)
    trainer.train()
    assert trainer.state.best_metric == 2.0


def test_a_callback_arrives_at_the_ranks_of_a_launch(tmp_path: Path) -> None:
    foreign = Foreign()
    foreign.seen.append(2)
    arrived = sent(ds.adapt(foreign, "huggingface"), tmp_path)
    assert arrived.__wrapped__.seen == [1, 2] and arrived.key == "Foreign"


def test_only_what_can_be_saved_so_is_advised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Best:
        loss = 1.0

    class Keeper:
        def __init__(self) -> None:
            self.best = Best()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.best.loss /= 2

    small_trainer(tmp_path, ds.adapt(Keeper(), "huggingface"), max_steps=10, save_steps=4).train()
    assert "training has changed Keeper.best.loss, which no checkpoint contains" in caplog.text
    assert "dalsegno.adapt" not in caplog.text
