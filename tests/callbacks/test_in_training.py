"""The built-ins in real training runs: what they do to the run, and what a resumed run knows."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from callbacks.scripted import trainer
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger, default_callbacks
from dalsegno.errors import UnknownName
from dalsegno.events.contexts import StepEndContext
from dalsegno.logs import read_records

WALL_CLOCK = {"timestamp", "peak_mem", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
WALL_CLOCK |= {"eval_runtime", "eval_samples_per_second", "tok_per_sec"}


def records(path: Path) -> list[dict[str, Any]]:
    """Without what only the clock decides."""
    return [{key: value for key, value in record.items() if key not in WALL_CLOCK} for record in read_records(path)]


def detector(**arguments: Any) -> DivergenceDetector:
    return DivergenceDetector(**{"smoothing": 1.0, "threshold": 1.0, "warmup": 0, "patience": 2, **arguments})


# -- DivergenceDetector -------------------------------------------------------------------------------------------


def test_a_stop_saves_and_a_resumed_run_needs_new_observations(tmp_path: Path) -> None:
    losses = [1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    result = trainer(tmp_path, losses, detector()).train()
    assert (result.reason, result.global_step, result.stopped_by) == ("stopped", 4, "DivergenceDetector")
    assert result.checkpoint == tmp_path / "checkpoints/step-00000004"

    resumed = trainer(tmp_path, losses, detector()).train(continue_stopped=True)
    assert (resumed.reason, resumed.global_step) == ("stopped", 6), "as many as the patience is"


def test_an_abort_saves_nothing_even_if_a_save_is_due(tmp_path: Path) -> None:
    result = trainer(tmp_path, [1.0, 1.0, math.nan, 1.0], detector(action="abort"), save_steps=1).train()
    assert (result.reason, result.global_step) == ("aborted", 3)
    assert result.why == "loss diverged at step 3: the value is nan"
    assert result.checkpoint == tmp_path / "checkpoints/step-00000002"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("losses", "reason"), [([1.0, 5.0, 9.0], "finished"), ([9.0, 5.0, 1.0], "stopped")])
def test_mode_max_watches_what_should_rise(tmp_path: Path, losses: list[float], reason: str) -> None:
    watching = detector(use_eval_loss=True, mode="max")
    assert trainer(tmp_path, losses, watching, eval_steps=1).train().reason == reason


def test_a_missing_metric_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dalsegno"):
        result = trainer(tmp_path, [1.0, 1.0, 9.0, 9.0], detector(metric_key="perplexity")).train()
    assert result.reason == "finished"
    assert [message for message in caplog.messages if "no 'perplexity' in the train record of step 1" in message]
    assert len([message for message in caplog.messages if "perplexity" in message]) == 1


# -- JsonLogger ---------------------------------------------------------------------------------------------------


class Crash(ds.Callback):
    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, ctx: StepEndContext) -> None:
        if ctx.step == self._at:
            raise RuntimeError("crash")


def test_logs_of_a_broken_run_become_those_of_an_unbroken_one(tmp_path: Path) -> None:
    losses = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    settings = {"save_steps": 2, "eval_steps": 3, "with_tokens": True}

    def run(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        return trainer(output_dir, losses, JsonLogger(run="a"), GradNormLogger(), *more, **settings)

    run(tmp_path / "whole").train()
    for step in (1, 4, 6):
        with pytest.raises(RuntimeError, match="crash"):
            run(tmp_path / "broken", Crash(step)).train()
    run(tmp_path / "broken").train()
    for name in ("train.jsonl", "gradient_norms.jsonl"):
        whole = records(tmp_path / "whole/logs" / name)
        assert records(tmp_path / "broken/logs" / name) == whole
        fields = [
            [sorted(record) for record in read_records(tmp_path / way / "logs" / name)] for way in ("whole", "broken")
        ]
        assert fields[0] == fields[1], "whatever only the clock decides is there too"
    train = records(tmp_path / "whole/logs/train.jsonl")
    assert train[0] == {"kind": "header", "run": "a"}
    assert [record["loss"] for record in train if "loss" in record] == losses
    assert [record.get("kind") for record in train].count("eval") == 2
    assert [record.get("kind") for record in train].count("final") == 1


def test_a_users_own_record_is_written_while_training_runs(tmp_path: Path) -> None:
    class Says(ds.Callback):
        def on_train_begin(self, ctx: Any) -> None:
            ctx.trainer.log({"mood": "good"})

    trainer(tmp_path, [1.0], JsonLogger(), Says()).train()
    assert {"kind": "user", "global_step": 0, "epoch": 0.0, "mood": "good"} in records(tmp_path / "logs/train.jsonl")


# -- GradNormLogger -----------------------------------------------------------------------------------------------


def test_norms_are_of_the_clipped_gradients_at_each_evaluation(tmp_path: Path) -> None:
    """Both elements of ``weight`` have the gradient 0.5: a norm of 0.707, or of 0.1 once clipped."""
    for clip, norm in [(0.0, math.sqrt(0.5)), (0.1, 0.1)]:
        output_dir = tmp_path / str(clip)
        trainer(output_dir, [1.0] * 5, GradNormLogger(), eval_steps=2, max_grad_norm=clip).train()
        found = records(output_dir / "logs/gradient_norms.jsonl")
        assert [record["global_step"] for record in found] == [2, 4]
        assert found[0]["norms"] == {"weight": pytest.approx(norm, rel=1e-4)}


# -- the default ones ---------------------------------------------------------------------------------------------


def test_each_default_can_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, [1.0], logger := JsonLogger())
    keys = [callback.key for callback in default_callbacks()]
    assert keys == ["DefaultMetrics", "ProgressCallback", "InfoCallback"]
    for key in keys:
        run.remove_callback(key)
    with pytest.raises(UnknownName, match="DefaultMetrics"):
        run.remove_callback("DefaultMetrics")
    assert run.callbacks == [logger]
    run.train()
    assert capsys.readouterr().out == ""
    assert "peak_mem" not in next(record for record in read_records(tmp_path / "logs/train.jsonl") if "loss" in record)


def test_a_second_train_goes_on_with_the_same_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, [1.0] * 4, JsonLogger(), detector(), GradNormLogger(), max_steps=2)
    run.train()
    run.args.max_steps = 4
    assert run.train().global_step == 4
    steps = [record["global_step"] for record in records(tmp_path / "logs/train.jsonl") if "loss" in record]
    assert steps == [1, 2, 3, 4]
    printed = capsys.readouterr().out
    assert "steps      3 to 4 (resumed from checkpoints/step-00000002)" in printed
    assert printed.count("learning_rate\n") == 2, "each begins with a header"


def test_defaults_leave_the_training_itself_alone(tmp_path: Path) -> None:
    """Not one random number is drawn by them."""
    with_defaults = trainer(tmp_path / "with", [1.0] * 3, eval_steps=1)
    with_defaults.train()
    drawn = torch.rand(1)
    without = trainer(tmp_path / "without", [1.0] * 3, eval_steps=1)
    for callback in default_callbacks():
        without.remove_callback(callback.key)
    without.train()
    assert torch.equal(drawn, torch.rand(1))
