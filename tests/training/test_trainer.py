"""A run over several trainers: going on, going back, starting over, and who may hold its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno import checkpoint
from dalsegno.callbacks import JsonLogger
from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.listing import Summaries
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, Locked, NotFound
from dalsegno.logs import RunFile, read_records
from dalsegno.testing import compare_runs, start_ranks, tiny_regression_data
from support.intruder import intruder
from support.listeners import Journal, Listener, Trace
from support.models import Line
from support.resumed import stop_after
from support.small import same, small_trainer, weights


def logged(output_dir: Path, *callbacks: ds.Callback, **settings: Any) -> ds.Trainer:
    """A run of ten steps with a log, a checkpoint every two steps and a constant rate, unless ``settings`` differ."""
    usual = {"max_steps": 10, "logging_steps": 1, "save_steps": 2, "lr_scheduler_type": "constant"}
    return small_trainer(output_dir, JsonLogger(run="r"), Trace(), *callbacks, **{**usual, **settings})


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.suffix == "")


def losses_logged(log: Path) -> list[tuple[int, float]]:
    return [(record["global_step"], record["loss"]) for record in read_records(log) if "loss" in record]


def steps_logged(log: Path) -> list[int]:
    return [step for step, _ in losses_logged(log)]


def assert_same_run(first: Path, second: Path) -> None:
    comparison = compare_runs(first, second)
    assert comparison.identical, f"\n{comparison.table()}"


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = logged(tmp_path)
    done = first.train()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}

    journal = Journal()
    again = logged(tmp_path, journal)
    for result in (first.train(), again.train()):
        assert (result.global_step, result.reason, result.checkpoint) == (10, "finished", done.checkpoint)
        assert result.metrics == pytest.approx(done.metrics)
    assert "train_begin" not in journal.fired
    assert same(weights(first), weights(again))
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert now == files


@pytest.mark.parametrize("in_one_process", [True, False])
def test_more_steps_go_on_where_it_was(tmp_path: Path, in_one_process: bool) -> None:
    trainer = logged(tmp_path / "raised", max_steps=6, logging_steps=4)
    trainer.train()
    if in_one_process:
        trainer.args.max_steps = 10
    else:
        trainer = logged(tmp_path / "raised", logging_steps=4)
    result = trainer.train()
    assert (result.global_step, result.reason) == (10, "finished")
    whole = logged(tmp_path / "at once", logging_steps=4)
    assert result.metrics["train_loss"] == whole.train().metrics["train_loss"]
    assert same(weights(trainer), weights(whole))
    raised, at_once = (losses_logged(tmp_path / folder / "logs/train.jsonl") for folder in ("raised", "at once"))
    assert raised == at_once
    assert [step for step, _ in at_once] == [4, 8]


def test_no_flag_of_a_stop_sticks(tmp_path: Path) -> None:
    """The same trainer, stopped twice, continues each time."""
    stops = iter([3, 7, 0])
    wanted = {"stop": next(stops)}

    def stop(ctx: Any) -> None:
        if ctx.step == wanted["stop"]:
            ctx.control.stop("for now")

    trainer = logged(tmp_path, Listener({"on_step_end": stop}))
    results = []
    for following in stops:
        results.append(trainer.train())
        wanted["stop"] = following
    results.append(trainer.train())
    assert [(result.global_step, result.reason) for result in results] == [
        (3, "stopped"),
        (7, "stopped"),
        (10, "finished"),
    ]
    assert results[-1].stopped_by is None
    assert [leg.reason for leg in RunFile(tmp_path).load().legs] == ["stopped", "stopped", "finished"]


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    logged(tmp_path / "here", stop_after(5)).train()
    (tmp_path / "here").rename(tmp_path / "there")
    logged(tmp_path / "there").train()
    logged(tmp_path / "whole").train()
    assert_same_run(tmp_path / "whole", tmp_path / "there")


# --- one timeline -----------------------------------------------------------------------------------------------------


def test_going_back_moves_what_came_later(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder in (run, whole):
        logged(folder).train()
    later = {step: (run / f"checkpoints/step-{step:08d}/manifest.json").read_bytes() for step in (6, 8, 10)}
    log = (run / "logs/train.jsonl").read_bytes()

    journal = Journal(note=lambda ctx: getattr(ctx, "path", None))
    back = run / "checkpoints/step-00000004"
    result = logged(run, journal).train(back)
    assert dict(journal.notes)["load"] == back
    assert result.reason == "finished"
    assert_same_run(whole, run)

    attic = run / "rewound/timeline.0001/checkpoints"
    assert saved_steps(attic) == [6, 8, 10]
    assert {step: (attic / f"step-{step:08d}/manifest.json").read_bytes() for step in later} == later
    tail = (run / "logs/rewound/train.jsonl.0001").read_bytes()
    assert tail
    assert log.endswith(tail)
    assert steps_logged(run / "logs/rewound/train.jsonl.0001") == [5, 6, 7, 8, 9, 10]


def test_nothing_of_a_dead_timeline_is_picked_up(tmp_path: Path) -> None:
    """Back to step 4, and gone before anything new was saved: the next leg continues from step 4 too."""
    logged(tmp_path).train()

    def fail(ctx: Any) -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        logged(tmp_path, Listener({"on_step_begin": fail})).train(tmp_path / "checkpoints/step-00000004")
    journal = Journal(note=lambda ctx: getattr(ctx, "step", None))
    logged(tmp_path, journal).train()
    assert dict(journal.notes)["load"] == 4


def test_starting_over_moves_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    logged(run, stop_after(7)).train()
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    before.pop(Path(".lock"))

    logged(run).train(resume_from_checkpoint=False)
    logged(tmp_path / "whole").train()
    assert_same_run(tmp_path / "whole", run)
    attic = run / "rewound/timeline.0001"
    assert {path.relative_to(attic): path.read_bytes() for path in attic.rglob("*") if path.is_file()} == before
    assert len(RunFile(run).load().legs) == 1


def test_starting_over_needs_a_new_trainer(tmp_path: Path) -> None:
    trainer = logged(tmp_path, stop_after(3))
    trainer.train()
    with pytest.raises(ConfigurationError, match="this model is trained already; build a new trainer"):
        trainer.train(resume_from_checkpoint=False)


def test_a_checkpoint_of_another_run_begins_a_new_one(tmp_path: Path) -> None:
    logged(tmp_path / "first").train()
    untouched = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    origin = tmp_path / "first/checkpoints/step-00000006"
    result = logged(tmp_path / "second", max_steps=8).train(origin)
    assert (result.global_step, result.reason) == (8, "finished")
    assert saved_steps(tmp_path / "second/checkpoints") == [8]
    assert RunFile(tmp_path / "second").load().legs[0].from_checkpoint == str(origin)
    assert {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()} == untouched


def test_a_path_must_be_a_good_checkpoint(tmp_path: Path) -> None:
    logged(tmp_path).train()
    with pytest.raises(NotFound, match="step-00000005"):
        logged(tmp_path).train(tmp_path / "checkpoints/step-00000005")
    flip_a_bit(tmp_path / "checkpoints/step-00000004")
    with pytest.raises(DamagedCheckpoint, match=r"step-00000004.*shard-00000.safetensors"):
        logged(tmp_path).train(tmp_path / "checkpoints/step-00000004")
    assert saved_steps(tmp_path / "checkpoints") == [2, 4, 6, 8, 10], "nothing has been moved"


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    logged(run).train()
    logged(tmp_path / "whole").train()
    flip_a_bit(run / "checkpoints/step-00000010")
    result = logged(run).train()
    assert result.reason == "finished"
    assert "a damaged checkpoint is skipped" in caplog.text
    assert (run / "checkpoints/step-00000010.damaged").is_dir()
    assert_same_run(tmp_path / "whole", run)


def test_a_strict_resume_takes_the_newest_or_none(tmp_path: Path) -> None:
    logged(tmp_path).train()
    flip_a_bit(tmp_path / "checkpoints/step-00000010")
    with pytest.raises(DamagedCheckpoint, match="step-00000010"):
        logged(tmp_path).train(strict=True)
    assert saved_steps(tmp_path / "checkpoints") == [2, 4, 6, 8, 10]
    assert logged(tmp_path).train().reason == "finished"
    assert (tmp_path / "checkpoints/step-00000010.damaged").is_dir()


def test_a_run_without_a_whole_checkpoint_begins_anew_only_if_it_is_told_to(tmp_path: Path) -> None:
    logged(tmp_path, max_steps=4).train()
    for path in (tmp_path / "checkpoints").iterdir():
        flip_a_bit(path)
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="no checkpoint is valid") as raised:
            logged(tmp_path, max_steps=4).train()
        assert raised.value.__notes__ == [
            "resume_from_checkpoint=False starts anew, and moves all of output_dir into rewound/"
        ]
    assert logged(tmp_path, max_steps=4).train(False).global_step == 4
    assert saved_steps(tmp_path / "rewound/timeline.0001/checkpoints") == [2, 4]


def flip_a_bit(checkpoint: Path) -> None:
    shard = next((checkpoint / "model").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


# --- one process at a time --------------------------------------------------------------------------------------------


def test_a_second_process_is_locked_out(tmp_path: Path) -> None:
    errors: list[str] = []

    def try_to_join(ctx: Any) -> None:
        [outcome] = start_ranks(intruder, 1, tmp_path).wait()
        errors.append(outcome.error or "")

    small_trainer(tmp_path, Listener({"on_step_begin": try_to_join}), max_steps=1).train()
    assert "Locked" in errors[0]
    assert f"{tmp_path}: in use by process {os.getpid()} on " in errors[0]
    assert "wait for it, stop it, or use another output_dir" in errors[0]
    small_trainer(tmp_path, max_steps=2).train()  # and the lock is gone with the run


def test_a_second_trainer_in_this_process_is_locked_out_too(tmp_path: Path) -> None:
    other = small_trainer(tmp_path, max_steps=1)
    first = small_trainer(tmp_path, Listener({"on_step_begin": lambda ctx: other.train() and None}), max_steps=1)
    with pytest.raises(Locked, match="already in use by another run in this process"):
        first.train()
    assert other.train().global_step == 1


def test_a_leg_inside_another_one_is_refused_and_does_not_disturb_it(tmp_path: Path) -> None:
    def train_inside(ctx: Any) -> None:
        if ctx.state.global_step == 0:
            with pytest.raises(Locked):
                trainer.train()

    trainer = small_trainer(tmp_path, Listener({"on_step_begin": train_inside}), max_steps=1, save_strategy="no")
    trainer.train()
    trainer.args.max_steps = 2
    assert trainer.train().global_step == 2, "the second leg begins in memory, where the first one ended"


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.fixture
def worsening() -> Iterator[dict[str, Any]]:
    """Evaluation loss is lowest at step 4 and gets worse: the model is pulled away from there."""
    best_at = 4

    def spoil(ctx: Any) -> None:
        distance = abs(ctx.state.global_step + 1 - best_at)
        with torch.no_grad():
            ctx.model.layer.weight.fill_(1.0 + 0.1 * distance)
            ctx.model.layer.bias.zero_()

    yield {"spoil": Listener({"on_optimizer_step": spoil}, name="spoil"), "best_at": best_at}


def evaluated(output_dir: Path, *callbacks: ds.Callback, **settings: Any) -> ds.Trainer:
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    usual = {"max_steps": 10, "eval_steps": 2, "save_steps": 2}
    return small_trainer(output_dir, *callbacks, model=Line(), parts=parts, **{**usual, **settings})


def test_the_last_ones_and_the_best_one_are_kept(tmp_path: Path, worsening: dict[str, Any]) -> None:
    evaluated(tmp_path, worsening["spoil"], save_total_limit=2).train()
    assert saved_steps(tmp_path / "checkpoints") == [4, 8, 10]
    assert [entry.step for entry in Summaries().of(tmp_path / "checkpoints") if entry.best] == [4]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, worsening: dict[str, Any]) -> None:
    """A best checkpoint is written when it is due, and not; the log has the final record all the same."""
    trainer = evaluated(tmp_path, worsening["spoil"], load_best_model_at_end=True, save_steps=6)
    trainer.train()
    state = trainer.state
    assert (state.best_global_step, state.best_model_checkpoint) == (4, "checkpoints/step-00000004")
    assert saved_steps(tmp_path / "checkpoints") == [2, 4, 6, 10]
    best = checkpoint.read_tensors(CheckpointManager(tmp_path).find(tmp_path / "checkpoints/step-00000004"))["model"]
    assert same(weights(trainer), best)
    assert torch.equal(weights(trainer)["layer.weight"], torch.full((1, 8), 1.0))


def test_the_best_model_is_there_when_a_finished_run_is_taken_up_again(
    tmp_path: Path, worsening: dict[str, Any]
) -> None:
    first = evaluated(tmp_path, worsening["spoil"], load_best_model_at_end=True)
    first.train()
    again = evaluated(tmp_path, load_best_model_at_end=True)
    assert again.train().reason == "finished"
    assert same(weights(first), weights(again))


@pytest.mark.parametrize("in_one_process", [True, False])
def test_more_steps_go_on_from_the_last_weights_not_the_best(tmp_path: Path, in_one_process: bool) -> None:
    """The best weights are for whoever uses the model; the run itself has one timeline."""
    settings: dict[str, Any] = {"load_best_model_at_end": True, "lr_scheduler_type": "constant"}

    def climb(ctx: Any) -> None:
        with torch.no_grad():
            ctx.model.layer.weight += 0.5  # worse with every step

    def build(folder: str, max_steps: int) -> ds.Trainer:
        climber = Listener({"on_optimizer_step": climb}, name="climber")
        return evaluated(tmp_path / folder, climber, max_steps=max_steps, **settings)

    trainer = build("raised", 6)
    trainer.train()
    if in_one_process:
        trainer.args.max_steps = 10
    else:
        trainer = build("raised", 10)
    trainer.train()
    build("at once", 10).train()
    comparison = compare_runs(tmp_path / "at once", tmp_path / "raised")
    assert comparison.identical, f"\n{comparison.table()}"


def test_a_greater_metric_may_be_the_better_one(tmp_path: Path, worsening: dict[str, Any]) -> None:
    settings = {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = evaluated(tmp_path, worsening["spoil"], **settings)
    trainer.train()
    assert trainer.state.best_global_step == 10


# --- records ----------------------------------------------------------------------------------------------------------


def test_several_evaluation_sets(tmp_path: Path) -> None:
    data = {"near": tiny_regression_data(6, seed=1), "far": tiny_regression_data(5, seed=2)}
    records: list[tuple[str, list[str]]] = []
    names: list[str] = []
    handlers = {
        "on_log": lambda ctx: records.append((ctx.kind, [key for key in ctx.logs if key.endswith("_loss")])),
        "on_evaluate": lambda ctx: names.append(ctx.name),
    }
    settings = {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "far_loss"}
    trainer = small_trainer(tmp_path, Listener(handlers), model=Line(), parts={"eval_dataset": data}, **settings)
    trainer.train()
    assert names == ["near", "far"]
    assert records[:2] == [("eval", ["eval_near_loss"]), ("eval", ["eval_far_loss"])]
    metrics = trainer.evaluate()
    assert trainer.state.best_metric == metrics["eval_far_loss"]
    for name, length, seed in [("near", 6, 1), ("far", 5, 2)]:
        whole = tiny_regression_data(length, seed=seed)
        batch = torch.utils.data.default_collate([whole[index] for index in range(length)])
        with torch.no_grad():
            assert metrics[f"eval_{name}_loss"] == pytest.approx(float(trainer.model(**batch)))


@pytest.mark.parametrize(("first", "steps"), [(False, [4, 8]), (True, [1, 4, 8])])
def test_the_first_step_may_be_logged_too(tmp_path: Path, first: bool, steps: list[int]) -> None:
    logged(tmp_path, logging_steps=4, logging_first_step=first).train()
    assert steps_logged(tmp_path / "logs/train.jsonl") == steps


def test_a_record_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    """Also where a leg ended in between."""
    losses: dict[int, float] = {}
    note = Listener({"on_step_end": lambda ctx: losses.update({ctx.step: ctx.loss})}, name="note")
    logged(tmp_path, note, stop_after(6), logging_steps=4).train()
    logged(tmp_path, note, logging_steps=4).train()
    records = dict(losses_logged(tmp_path / "logs/train.jsonl"))
    assert records == pytest.approx({end: sum(losses[end - i] for i in range(4)) / 4 for end in (4, 8)})
