"""The callbacks of the installed transformers, unmodified; and the same script under transformers' own Trainer."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import RunFile
from dalsegno.testing import (
    FaultPlan,
    assert_resume_equivalent,
    tiny_regression_data,
)
from support.models import Outputs
from support.small import NOISY, small_trainer

# --- the same script, there and here ----------------------------------------------------------------------------------

EVENTS = sorted(name for name in dir(TrainerCallback) if name.startswith("on_"))


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Every event with its step, with what it was given, and with the epoch where that is counted."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        for name in EVENTS:
            setattr(self, name, self._entry(name))

    def _entry(self, name: str) -> Any:
        counted = name in ("on_step_end", "on_log", "on_evaluate", "on_save")

        def write(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            epoch = round(state.epoch, 6) if counted else None
            self.seen.append((name, state.global_step, epoch, state.max_steps, sorted(kwargs)))

        return write


class Requester(TrainerCallback):  # type: ignore[misc]
    """Ends an epoch early, and asks for everything once."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_epoch_stop |= state.global_step == 2
        control.should_log |= state.global_step == 4
        control.should_evaluate |= state.global_step == 4
        control.should_save |= state.global_step == 4
        return control


BY_STEPS = {"max_steps": 8, "logging_steps": 2, "eval_steps": 4, "save_steps": 4, "eval_strategy": "steps"}
BY_EPOCHS = {"num_train_epochs": 2} | dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
NOT_BETTER = {"learning_rate": 0.0, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
SCRIPTS: dict[str, tuple[dict[str, Any], Any]] = {
    "by steps, ending inside an epoch": (BY_STEPS, None),
    "by epochs": (BY_EPOCHS, None),
    "with requests": (BY_STEPS | dict.fromkeys(("max_steps", "eval_steps", "save_steps"), 7), Requester),
    "stopped early": (BY_STEPS | {"eval_steps": 2, "save_steps": 2, **NOT_BETTER}, EarlyStoppingCallback),
}
SHARED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


def there(output_dir: Path, settings: dict[str, Any], *callbacks: Any) -> None:
    transformers.Trainer(
        Outputs(),
        transformers.TrainingArguments(str(output_dir), report_to=[], label_names=["y"], **SHARED, **settings),
        train_dataset=tiny_regression_data(20),
        eval_dataset=tiny_regression_data(8, seed=1),
        callbacks=list(callbacks),
    ).train()


def here(output_dir: Path, settings: dict[str, Any], *callbacks: Any) -> ds.TrainResult:
    trainer = ds.Trainer(
        Outputs(),
        ds.TrainingArguments(output_dir, **{"save_in_background": False, **SHARED, **settings}),
        train_dataset=tiny_regression_data(20),
        eval_dataset=tiny_regression_data(8, seed=1),
        callbacks=callbacks,
    )
    for name in NOISY:
        trainer.remove_callback(name)
    return trainer.train()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_events_as_under_their_own_trainer(name: str, tmp_path: Path) -> None:
    settings, other = SCRIPTS[name]
    theirs, ours = Recorder(), Recorder()
    there(tmp_path / "there", settings, *([other()] if other else []), theirs)
    here(tmp_path / "here", settings, *([other()] if other else []), ours)
    assert [entry[:3] for entry in ours.seen] == [entry[:3] for entry in theirs.seen]
    running = [index for index, entry in enumerate(theirs.seen) if entry[0] != "on_init_end"]
    assert [ours.seen[index] for index in running] == [theirs.seen[index] for index in running]


def test_records_have_what_theirs_have(tmp_path: Path) -> None:
    histories: dict[str, list[dict[str, Any]]] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def __init__(self, place: str) -> None:
            self.place = place

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            histories[self.place] = list(state.log_history)

    there(tmp_path / "there", BY_STEPS, Keep("there"))
    here(tmp_path / "here", BY_STEPS, Keep("here"))
    assert len(histories["here"]) == len(histories["there"])
    for ours, theirs in zip(histories["here"], histories["there"], strict=True):
        assert set(theirs) <= set(ours)
        assert (ours["step"], ours["epoch"]) == (theirs["step"], pytest.approx(theirs["epoch"]))


def test_their_flow_changes_nothing_but_a_last_evaluation(tmp_path: Path) -> None:
    settings = BY_STEPS | {"max_steps": 7, "save_steps": 7}
    alone, beside_it, theirs = Recorder(), Recorder(), Recorder()
    here(tmp_path / "alone", settings, alone)
    result = here(tmp_path / "beside it", settings, DefaultFlowCallback(), beside_it)
    there(tmp_path / "there", settings, theirs)
    assert (result.reason, result.stopped_by) == ("finished", None)
    evaluations = [
        [entry[1] for entry in each.seen if entry[0] == "on_evaluate"] for each in (alone, beside_it, theirs)
    ]
    assert evaluations == [[4], [4, 7], [4, 7]]
    assert [entry[:3] for entry in beside_it.seen] == [entry[:3] for entry in theirs.seen]


# --- every class ------------------------------------------------------------------------------------------------------

MODULES = (
    "transformers.trainer_callback",
    "transformers.trainer_jit_checkpoint",
    "transformers.integrations.integration_utils",
    "transformers.utils.notebook",
)
NOT_CALLBACKS = {"TrainerCallback", "CallbackHandler"}
WITH_ARGUMENTS: dict[str, dict[str, Any]] = {"EarlyStoppingCallback": {"early_stopping_patience": 5}}


def their_classes() -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # a notebook's
            continue
        classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == name]
        found |= {each.__name__: each for each in classes if issubclass(each, TrainerCallback)}
    return {name: each for name, each in found.items() if name not in NOT_CALLBACKS}


INSTALLED = {"DefaultFlowCallback", "EarlyStoppingCallback", "MLflowCallback", "PrinterCallback", "ProgressCallback"}
INSTALLED |= {"JITCheckpointCallback", "TensorBoardCallback", "WandbCallback", "KubeflowCallback"}
"""Those that need nothing, or what the tests have."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trackers write into the test's folder, and to nobody."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "token").write_text("none")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Neptune's, which cannot be built
@pytest.mark.parametrize("name", sorted(their_classes()))
def test_each_of_their_classes_runs_unmodified(name: str, tmp_path: Path, offline: None) -> None:
    try:
        callback = their_classes()[name](**WITH_ARGUMENTS.get(name, {}))
    except (RuntimeError, ImportError, ValueError) as error:  # its tracker is not installed, or not set up
        assert name not in INSTALLED, error
        pytest.skip(str(error))
    recorder = Recorder()
    settings = BY_STEPS | {"load_best_model_at_end": True}
    assert here(tmp_path / "run", settings, callback, recorder).reason == "finished"
    assert recorder.seen[-1][:2] == ("on_train_end", 8)


def test_tensorboard_has_what_it_was_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers.integrations import TensorBoardCallback

    here(tmp_path, BY_STEPS, TensorBoardCallback())
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == [2, 4, 6, 8]
    assert [event.step for event in accumulator.Scalars("eval/loss")] == [4, 8]


def test_mlflow_has_what_it_was_told(tmp_path: Path, offline: None) -> None:
    mlflow = pytest.importorskip("mlflow")
    from transformers.integrations import MLflowCallback

    here(tmp_path / "run", BY_STEPS, MLflowCallback())
    mlflow.flush_async_logging()  # the callback does not wait for its own queue
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(metric.step for metric in history) == [2, 4, 6, 8], "mlflow sends them by several threads"
    assert run.data.params["max_steps"] == "8"
    assert run.info.status == "FINISHED"


def test_the_printer_takes_from_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here(tmp_path, BY_STEPS, PrinterCallback(), JsonLogger())
    assert capsys.readouterr().out.count("'eval_loss'") == 2


# --- state ------------------------------------------------------------------------------------------------------------


def stopping_early(output_dir: Path) -> ds.Trainer:
    """Nothing is learnt, so no evaluation is better than the first: it stops at the fifth."""
    return small_trainer(
        output_dir,
        EarlyStoppingCallback(4),
        ds.adapt(EarlyStoppingCallback(20, early_stopping_threshold=100.0), name="never content"),
        JsonLogger(),
        parts={"eval_dataset": tiny_regression_data(8, seed=1)},
        **{"max_steps": 40, "eval_steps": 2, "save_steps": 2, "logging_steps": 2, **NOT_BETTER},
    )


def test_early_stopping_is_killed_and_goes_on_counting(tmp_path: Path) -> None:
    assert_resume_equivalent(stopping_early, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)


def test_a_stop_by_their_flag_is_the_runs_end(tmp_path: Path) -> None:
    result = stopping_early(tmp_path).train()
    assert result.reason == "stopped" and result.global_step < 40
    assert stopping_early(tmp_path).train().global_step == result.global_step
    record = RunFile(tmp_path).load()
    assert record is not None and len(record.legs) == 1


def stop_counters(output_dir: Path, *callbacks: Any, max_steps: int) -> list[int]:
    small_trainer(
        output_dir,
        *callbacks,
        parts={"eval_dataset": tiny_regression_data(8, seed=1)},
        **{"max_steps": max_steps, "eval_steps": 2, "save_steps": 2, **NOT_BETTER},
    ).train()
    return [callback.__wrapped__.early_stopping_patience_counter for callback in callbacks]


def test_what_a_class_built_on_theirs_adds_is_missed_in_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counts(ProgressCallback):  # type: ignore[misc]
        """Its base counts, too, and begins anew at each start."""

        count = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

    settings = {"max_steps": 2, "save_steps": 1, "gradient_accumulation_steps": 2}
    small_trainer(tmp_path, Counts(), ProgressCallback(), **settings).train()
    (said,) = [each.getMessage() for each in caplog.records if "no checkpoint contains" in each.getMessage()]
    assert "training has changed Counts.count, which" in said


def test_two_of_one_class_are_not_mixed_up(tmp_path: Path) -> None:
    def two(patience: int) -> list[Any]:
        return [
            ds.adapt(EarlyStoppingCallback(patience), name="loss"),
            ds.adapt(EarlyStoppingCallback(patience, early_stopping_threshold=-1.0), name="always content"),
        ]

    first = stop_counters(tmp_path, *two(10), max_steps=6)
    again = two(20)
    second = stop_counters(tmp_path, *reversed(again), max_steps=10)[::-1]
    assert first[0] == 2 and second[0] == 4
    assert first[1] == 2 and second[1] == 4
    assert [each.__wrapped__.early_stopping_patience for each in again] == [20, 20], "what they are built with now"
