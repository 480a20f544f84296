"""Callbacks written for Lightning, in dalsegno's Trainer: Lightning's own, and some of its contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.lightning import Callback
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
from interop.script import Broken, play
from support.models import Line
from support.small import small_trainer

METHODS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
NEVER = ("on_sanity_check_start", "on_sanity_check_end", "on_save_checkpoint", "on_load_checkpoint")


def journal() -> Any:
    """Notes each call, with the step and the epoch that the trainer reports, and what it is called with."""
    seen: list[Any] = []

    def note(name: str) -> Any:
        def method(self: Any, trainer: Any, pl_module: Any, *given: Any) -> None:
            numbers = [each for each in given if isinstance(each, (int, str))]
            self.seen.append((name.removeprefix("on_"), trainer.global_step, trainer.current_epoch, *numbers))

        return method

    return type("Journal", (Callback,), {"seen": seen, **{name: note(name) for name in METHODS if name not in NEVER}})()


# --- the order --------------------------------------------------------------------------------------------------------


def passed(step: int, epoch: int, *batches: int) -> list[Any]:
    """The calls of one step, of micro-batches with these numbers in their epoch."""
    calls: list[Any] = []
    for number in batches:
        calls.append(("train_batch_start", step, epoch, number))
        calls += [(name, step, epoch) for name in ("before_backward", "after_backward")]
        if number != batches[-1]:
            calls.append(("train_batch_end", step, epoch, number))
    calls += [(name, step, epoch) for name in ("before_optimizer_step", "before_zero_grad")]
    return [*calls, ("train_batch_end", step + 1, epoch, batches[-1])]


def validated(step: int, epoch: int) -> list[Any]:
    begin = [("validation_start", step, epoch), ("validation_epoch_start", step, epoch)]
    batches = [(f"validation_batch_{end}", step, epoch, index, 0) for index in (0, 1) for end in ("start", "end")]
    return [*begin, *batches, ("validation_epoch_end", step, epoch), ("validation_end", step, epoch)]


BEGIN = [("setup", 0, 0, "fit"), ("fit_start", 0, 0), ("train_start", 0, 0), ("train_epoch_start", 0, 0)]


def test_a_whole_run(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    first = [*passed(0, 0, 0, 1), *passed(1, 0, 2, 3), *passed(2, 0, 4), *validated(3, 0), ("train_epoch_end", 3, 0)]
    second = [*passed(3, 1, 0, 1), *passed(4, 1, 2, 3), *passed(5, 1, 4), *validated(6, 1), ("train_epoch_end", 6, 1)]
    end = [("train_end", 6, 2), ("fit_end", 6, 2), ("teardown", 6, 2, "fit")]
    assert callback.seen == [*BEGIN, *first, ("train_epoch_start", 3, 1), *second, *end]


def test_an_exception_is_reported_and_everything_is_torn_down(tmp_path: Path) -> None:
    callback = journal()
    with pytest.raises(Broken):
        play(tmp_path, callback, break_at=1)
    assert [call[0] for call in callback.seen[-3:]] == ["before_optimizer_step", "exception", "teardown"]


def test_a_leg_inside_an_epoch_continues_its_numbers(tmp_path: Path) -> None:
    play(tmp_path, journal(), stop_at=2)
    callback = journal()
    play(tmp_path, callback)
    begin = [("setup", 0, 0, "fit"), ("fit_start", 2, 0), ("train_start", 2, 0)]
    assert callback.seen[:4] == [*begin, ("train_batch_start", 2, 0, 4)]


class States(Callback):
    """What the trainer reports at each method, by the method's name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}


def _note(name: str) -> Any:
    def method(self: States, trainer: Any, pl_module: Any, *given: Any, **named: Any) -> None:
        where = (trainer.global_step, trainer.current_epoch, trainer.training, trainer.validating, trainer.should_stop)
        state = trainer.state.fn == "fit", trainer.state.stage == "validate", trainer.sanity_checking
        numbers = [each for each in given if isinstance(each, int)]
        self.seen.setdefault(name, []).append((*where, *state, *numbers))

    return method


@pytest.mark.parametrize("evaluates", [True, False])
def test_each_method_finds_the_trainer_as_in_lightnings_own(tmp_path: Path, evaluates: bool) -> None:
    """Except that gradients are cleared after the update, and the epoch's evaluation comes after its end."""
    pl = pytest.importorskip("pytorch_lightning")
    noted = {name: _note(name) for name in METHODS if name not in (*NEVER, "on_before_zero_grad")}
    theirs = type("Theirs", (States, pl.Callback), noted)()
    ours = type("Ours", (States,), noted)()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.line(**batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.line(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    given = {"accelerator": "cpu", "num_sanity_val_steps": 0, "limit_val_batches": None if evaluates else 0}
    trainer = pl.Trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[theirs], **quiet, **given)
    data = [tiny_regression_data(20), tiny_regression_data(8, seed=1)]
    trainer.fit(Module(), *[torch.utils.data.DataLoader(each, batch_size=4) for each in data])

    settings = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    if evaluates:
        settings |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    small_trainer(tmp_path, ours, model=Line(), parts={"eval_dataset": data[1]}, **settings).train()
    validated = [name for name in ours.seen if "validation_batch" in name]
    for name in validated:
        ours.seen[name] = [
            seen[:-1] for seen in ours.seen[name]
        ]  # without the index of the set, which theirs leaves out
    assert ours.seen == theirs.seen
    assert bool(validated) is evaluates


# --- Lightning's own --------------------------------------------------------------------------------------------------


def of_lightning(name: str) -> Any:
    return getattr(pytest.importorskip("pytorch_lightning").callbacks, name)


def evaluated(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    given = {"max_steps": 40, "eval_steps": 4, "save_steps": 4, "save_in_background": False, **settings}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    return small_trainer(output_dir, *callbacks, model=Line(), parts=parts, **given)


@pytest.mark.parametrize("monitor", ["val_loss", "eval_loss"])
def test_early_stopping_stops_the_run_over_two_legs(tmp_path: Path, monitor: str) -> None:
    """Nothing improves: after the first of its three bad evaluations, the leg ends; the next leg waits for two."""

    def stopper() -> Any:
        return of_lightning("EarlyStopping")(monitor, patience=3)

    evaluated(tmp_path, stopper(), learning_rate=0.0, max_steps=8).train()
    second = stopper()
    trainer = evaluated(tmp_path, second, learning_rate=0.0)
    result = trainer.train()
    assert (result.reason, result.global_step, second.wait_count) == ("stopped", 16, 3)
    assert result.stopped_by == f"EarlyStopping{{'monitor': '{monitor}', 'mode': 'min'}}"
    assert trainer.callbacks[-1].key == result.stopped_by, "so that two of them can be told apart"


def test_early_stopping_without_evaluations_looks_at_the_ends_of_epochs(tmp_path: Path) -> None:
    """As in Lightning, where it would otherwise wait for evaluations that never come."""
    stopper = of_lightning("EarlyStopping")("train_loss", min_delta=0.1, patience=2)
    result = small_trainer(
        tmp_path, stopper, model=Line(), num_train_epochs=9, logging_steps=5, learning_rate=0.0
    ).train()
    assert (result.global_step, stopper.stopped_epoch, stopper.wait_count) == (15, 2, 2)


def test_an_evaluation_outside_of_training_does_not_count_for_early_stopping(tmp_path: Path) -> None:
    stopper = of_lightning("EarlyStopping")("val_loss")
    trainer = evaluated(tmp_path, stopper, max_steps=8)
    trainer.train()
    before = stopper.state_dict()
    trainer.evaluate()
    assert stopper.state_dict() == before


def test_one_of_a_metric_that_there_is_not_says_which_there_are(tmp_path: Path) -> None:
    trainer = evaluated(tmp_path, of_lightning("EarlyStopping")("val_accuracy"), max_steps=4)
    with pytest.raises(RuntimeError, match=r"val_accuracy. which is not available.*eval_loss.*val_loss"):
        trainer.train()


def test_learning_rates_are_in_the_records_of_their_steps(tmp_path: Path) -> None:
    monitor = of_lightning("LearningRateMonitor")("step")
    small_trainer(tmp_path, monitor, JsonLogger(), max_steps=4, logging_steps=2).train()
    records = [each for each in _records(tmp_path) if each.get("kind") is None]
    assert [each["lr-AdamW/pg1"] for each in records] == [each["learning_rate"] for each in records]
    assert [each["global_step"] for each in records] == [2, 4]


def test_a_timer_and_functions(tmp_path: Path) -> None:
    begun: list[Any] = []
    timer = of_lightning("Timer")(duration={"hours": 1})
    functions = of_lightning("LambdaCallback")(on_train_start=lambda trainer, module: begun.append(trainer.global_step))
    small_trainer(tmp_path, timer, functions, max_steps=2, save_steps=2).train()
    again = of_lightning("Timer")(duration={"seconds": 0})
    result = small_trainer(tmp_path, again, max_steps=4, save_steps=2).train()
    assert begun == [0]
    assert again._offset > 0, "the time of the first leg"
    assert (result.global_step, result.stopped_by) == (3, "Timer")


@pytest.mark.parametrize(
    ("name", "given", "instead"),
    [
        ("ModelCheckpoint", {}, "set save_steps="),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1}, "use dalsegno.callbacks.ModelMerge"),
        ("GradientAccumulationScheduler", {"scheduling": {0: 2}}, "set gradient_accumulation_schedule="),
        ("TQDMProgressBar", {}, "use dalsegno.callbacks.ProgressCallback"),
    ],
)
def test_what_needs_lightnings_trainer_is_refused(tmp_path: Path, name: str, given: Any, instead: str) -> None:
    message = f"{name} needs parts of the library's own trainer; instead, {instead}"
    with pytest.raises(ds.ConfigurationError, match=message):
        small_trainer(tmp_path, of_lightning(name)(**given))


# --- trainer and module -----------------------------------------------------------------------------------------------


def test_what_nothing_stands_for_raises(tmp_path: Path) -> None:
    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for owner, name in ((trainer, "accelerator"), (pl_module, "backbone"), (trainer.strategy, "model")):
                with pytest.raises(AttributeError, match=f"{name}: dalsegno has no counterpart of it; available: "):
                    getattr(owner, name)
            assert pl_module.layer is pl_module.trainer.model.layer
            assert [name for name, _ in pl_module.named_parameters()] == ["layer.weight", "layer.bias"]
            pl_module.note = "mine"
            assert pl_module.note == "mine" and not hasattr(trainer.model, "note")
            with pytest.raises(AttributeError):
                trainer.accumulate_grad_batches = 2
            with pytest.raises(AttributeError, match=r"trainer\.fit_loop\.max_epochs cannot be set"):
                trainer.fit_loop.max_epochs = 2

    small_trainer(tmp_path, Asks(), model=Line(), max_steps=1).train()


class Watches(Callback):
    """With a state by both of Lightning's ways, and numbers of its own in records, of steps, evaluations and epochs."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += torch.tensor([float(outputs["loss"]), batch_idx])
        self.batches += 1
        pl_module.log("total", self.total[0], sync_dist=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log_dict({"val_batches": self.batches, "known": trainer.callback_metrics["total"]})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("of_epoch", trainer.callback_metrics["val_loss"], on_epoch=True)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] == trainer.global_step
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]


def watched(output_dir: Path) -> ds.Trainer:
    settings = {"max_steps": 12, "logging_steps": 2, "eval_steps": 3, "save_steps": 4, "gradient_accumulation_steps": 2}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    return small_trainer(output_dir, Watches(), JsonLogger(), parts=parts, length=28, **settings)


def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    assert_resume_equivalent(watched, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)
    records = _records(tmp_path / "killed")
    kinds = (None, "eval", "user")
    train, evaluations, own = ([each for each in records if each.get("kind") == kind] for kind in kinds)
    assert [each["global_step"] for each in train if "total" in each] == [2, 4, 6, 8, 10, 12]
    assert [each["global_step"] for each in evaluations if "val_batches" in each] == [3, 6, 9, 12]
    assert [each["global_step"] for each in own if "of_epoch" in each] == [4, 8, 12]


def log_on_a_rank(output_dir: Path) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            rank = trainer.global_rank
            pl_module.log("mean", rank, sync_dist=True)
            pl_module.log("first", rank + 5)
            if trainer.is_global_zero:
                pl_module.log("alone", 7)
            assert trainer.strategy.broadcast(rank + 3, src=1) == 4
            assert trainer.strategy.reduce_boolean_decision(trainer.is_global_zero, all=False)
            assert not trainer.strategy.reduce_boolean_decision(trainer.is_global_zero, all=True)

    small_trainer(output_dir, Logs(), JsonLogger(), max_steps=1, logging_steps=1).train()


def _records(output_dir: Path) -> list[dict[str, Any]]:
    return list(read_records(output_dir / "logs/train.jsonl"))


def test_a_record_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(log_on_a_rank, 2, tmp_path)
    (record,) = [each for each in _records(tmp_path) if "mean" in each]
    assert (record["mean"], record["first"], record["alone"]) == (0.5, 5, 7)


def test_a_mean_over_an_epoch_is_refused(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("mine", 1.0, on_epoch=True)

    with pytest.raises(ds.ConfigurationError, match="records have no means over an epoch"):
        small_trainer(tmp_path, Logs(), max_steps=1).train()
