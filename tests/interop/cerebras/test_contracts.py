"""What the Model Zoo's own callbacks use of their trainer, by classes of the same contract.

The library needs its compiler, so its classes do not install here.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records
from interop.script import play
from support.small import small_trainer


def base() -> Any:
    from cerebras.modelzoo.trainer.callbacks import Callback

    return Callback


def records(output_dir: Path) -> list[dict[str, Any]]:
    return list(read_records(output_dir / "logs" / "train.jsonl"))


# --- profilers --------------------------------------------------------------------------------------------------------


def duration_profiler() -> Any:
    class DurationProfiler(base()):  # type: ignore[misc]
        """Looks the current stage up at every batch, and what remains of the run."""

        def __init__(self) -> None:
            self.stages: list[tuple[str, int, int | None]] = []
            self.remaining: list[tuple[str, int, list[tuple[str, int | None]]]] = []

        def pre_setup(self, trainer: Any) -> None:
            assert trainer.logging.enable_act_frequency is False
            self.schedule = trainer.schedule

        def on_enter_validate(self, trainer: Any, stack: Any, val_dataloader: Any, loop: Any) -> None:
            setattr(self, loop.on_batch_end_hook, self.on_validate_batch_end)
            setattr(self, loop.on_end_hook, self.on_validate_end)

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._note(trainer)

        def on_validate_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._note(trainer)

        def on_train_end(self, trainer: Any, model: Any, loop: Any, loop_idx: int) -> None:
            assert self.schedule.current_stage.name == "train", "the stage is not over yet"
            assert (loop.num_trains, loop_idx < loop.num_trains) == (2, True)

        def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None:
            assert self.schedule.current_stage.name == "validate"

        def _note(self, trainer: Any) -> None:
            now, schedule = self.schedule.current_stage, self.schedule
            later = [(stage.name, stage.steps) for stage in schedule.stages_remaining]
            self.stages.append((now.name, now.start_step, now.steps))
            self.remaining.append((now.name, schedule.batches_remaining, later))
            assert trainer.is_final_iteration == trainer.executor.on_final_iteration
            trainer.log_metrics(final=trainer.is_final_iteration)

    return DurationProfiler()


def test_a_schedule_of_stages(tmp_path: Path) -> None:
    """Six steps of one batch, evaluated after the third and the last."""
    callback = duration_profiler()
    settings = {"gradient_accumulation_steps": 1, "num_train_epochs": 3, "max_steps": 6, "logging_steps": 1}
    play(tmp_path, callback, JsonLogger(), **settings)
    first, second = ("train", 0, 3), ("train", 3, 3)
    validation = [("validate", 3, 2)] * 2
    assert callback.stages == [*[first] * 3, *validation, *[second] * 3, *[("validate", 6, 2)] * 2]
    later = [("train", 3), ("validate", 2)]
    assert callback.remaining[:5] == [
        *[("train", left, [("validate", 2), *later]) for left in (2, 1, 0)],
        *[("validate", left, later) for left in (1, 0)],
    ]
    final = [(record["global_step"], record["final"]) for record in records(tmp_path) if "loss" in record]
    assert final == [(1, False), (2, False), (3, True), (4, False), (5, False), (6, True)]


def test_the_stage_types_are_the_librarys(tmp_path: Path) -> None:
    from enum import Enum, auto

    class StageType(Enum):
        TRAIN_DATALOADER = auto()
        VAL_DATALOADER = auto()

    kinds: list[Any] = []

    class Look(base()):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
            kinds.extend(stage.type == StageType.TRAIN_DATALOADER for stage in trainer.schedule.stages)
            assert trainer.schedule.epochs == trainer.schedule.epochs_remaining == 2

    play(tmp_path, Look())
    assert kinds == [True, False, True, False]


def test_performance_is_saved_with_each_stage(tmp_path: Path) -> None:
    class SavePerformanceData(base()):  # type: ignore[misc]
        @contextmanager
        def save(self, trainer: Any) -> Any:
            yield
            path = trainer.executor.artifact_dir / "performance.json"
            path.write_text(json.dumps({"step": trainer.global_step}))

        def on_enter_train(self, trainer: Any, stack: Any, train_dataloader: Any, loop: Any, loop_idx: int) -> None:
            stack.enter_context(self.save(trainer))

    play(tmp_path, SavePerformanceData())
    (path,) = tmp_path.rglob("performance.json")
    assert json.loads(path.read_text()) == {"step": 6}


def test_a_run_exits_after_the_steps_that_are_to_be_checked(tmp_path: Path) -> None:
    class NaNChecker(base()):  # type: ignore[misc]
        def __init__(self, num_steps: int) -> None:
            self.num_steps = num_steps

        def setup(self, trainer: Any) -> None:
            schedule = trainer.schedule
            trainer.early_exit.register(lambda: schedule.batch_idx + 1 >= self.num_steps)

    result = small_trainer(tmp_path, NaNChecker(2), max_steps=4).train()
    assert (result.global_step, result.stopped_by) == (2, "early_exit")


# --- records ----------------------------------------------------------------------------------------------------------


def test_tensors_in_a_record_are_numbers(tmp_path: Path) -> None:
    batches: list[torch.Tensor] = []

    class LogInputSummaries(base()):  # type: ignore[misc]
        def on_before_forward(self, trainer: Any, model: Any, batch: Any, args: Any, kwargs: Any) -> None:
            batches.append(batch["x"])
            trainer.log_metrics(**{"input.x": batch["x"], "one": torch.ones(1), "seconds": Seconds(2.5)})

    class Seconds(float): ...

    class Keeps(ds.Callback):
        """The newest record, which could not be saved with a tensor or a subclass of float in it."""

        record: dict[str, Any] = {}

        def on_log(self, ctx: Any) -> None:
            self.record = dict(ctx.logs)

        def state_dict(self) -> dict[str, Any]:
            return self.record

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    callbacks = [LogInputSummaries(), Keeps(), JsonLogger()]
    small_trainer(tmp_path, *callbacks, max_steps=2, logging_steps=1, save_steps=1).train()
    first = next(record for record in records(tmp_path) if "loss" in record)
    x = batches[0].double()
    expected = {"mean": x.mean(), "std": x.std(correction=0), "min": x.min(), "max": x.max()}
    assert all(first[f"input.x/{name}"] == float(each) for name, each in expected.items())
    assert (first["one"], first["seconds"]) == (1.0, 2.5)


def test_loggers_get_every_record(tmp_path: Path) -> None:
    library = type("Logger", (base(),), {"__module__": "cerebras.modelzoo.trainer.loggers"})
    seen: list[tuple[int, list[str]]] = []

    class TensorBoardLogger(library):  # type: ignore[misc, valid-type]
        def setup(self, trainer: Any) -> None:
            (trainer.summary_dir / "tf_events").symlink_to("somewhere")
            assert trainer.loggers == [self]

        def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
            seen.append((step, sorted(set(metrics) & {"loss", "eval_loss", "train_runtime"})))

    class Other(base()):  # type: ignore[misc]
        def log_metrics(self, trainer: Any) -> None:
            raise AssertionError("it is no logger")

    play(tmp_path, TensorBoardLogger(), Other())
    training, evaluation = [["loss"]], [["eval_loss"]]
    expected = [(2, training[0]), (3, evaluation[0]), (4, training[0]), (6, training[0]), (6, evaluation[0])]
    assert seen == [*expected, (6, ["train_runtime"])]


def test_progress_of_a_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dalsegno")

    class ProgressLogger(base()):  # type: ignore[misc]
        def on_validate_start(self, trainer: Any, model: Any, val_dataloader: Any, loop: Any) -> None:
            self.losses: list[float] = []
            assert loop.eval_steps == 2

        def on_validate_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].item())
            if trainer.is_log_step:
                trainer.logger.info("batch %d", trainer.executor.user_iteration)
            if trainer.is_final_iteration:
                trainer.logger.info("average of %d", len(self.losses))

        def on_fit_end(self, trainer: Any, loop: Any) -> None:
            assert trainer.backend._impl.is_e2e_execution

    play(tmp_path, ProgressLogger(), logging_steps=10)
    assert [each for each in caplog.messages if each.startswith(("batch", "average"))] == [
        "batch 2",
        "average of 2",
    ] * 2


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_deque_in_a_state_comes_back_as_one(tmp_path: Path) -> None:
    class Recent(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps: deque[int] = deque(maxlen=3)

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps.append(trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
            state_dict["recent"] = {"steps": self.steps}

        def on_load_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
            self.steps = state_dict["recent"]["steps"]

    small_trainer(tmp_path, Recent(), max_steps=4, save_steps=2).train()
    again = Recent()
    small_trainer(tmp_path, again, max_steps=5, save_steps=2).train()
    assert again.steps == deque([3, 4, 5], maxlen=3) and again.steps.maxlen == 3


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("KeepNCheckpoints", "set save_total_limit="),
        ("SaveCheckpointState", "dalsegno checkpoints export"),
        ("Lora", "wrap the model before"),
        ("SamplesStreamedInfo", "dalsegno.callbacks.SamplesStreamedInfo"),
        ("SelectiveGrad", "requires_grad_"),
        ("LogSparsity", "share of zeros"),
        ("SavePerformanceData", "RateProfiler"),
        ("ComputeNorm", "dalsegno.callbacks.ComputeNorm"),
    ],
)
def test_what_works_on_their_own_files_is_refused(name: str, instead: str, tmp_path: Path) -> None:
    theirs = type(name, (base(),), {"__module__": "cerebras.modelzoo.trainer.callbacks.own"})()
    with pytest.raises(ds.ConfigurationError, match=f"{name} needs .*; instead, .*{instead}"):
        small_trainer(tmp_path, theirs)


def test_an_error_inside_a_property_is_the_one_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        raise AttributeError("no such wheel")

    class Ask(base()):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
            monkeypatch.setattr(type(trainer), "model_state", property(broken), raising=False)
            _ = trainer.model_state

    with pytest.raises(AttributeError, match=r"^no such wheel"):
        small_trainer(tmp_path, Ask(), max_steps=1).train()
