"""What a review found: epochs' ends that save, requests of one rank, and runs that are left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.system import filesystem
from dalsegno.testing import (
    FaultPlan,
    assert_resume_equivalent,
    compare_runs,
    run_ranks,
    tiny_regression_data,
)
from support.listeners import Journal, Listener
from support.models import Layered, Line
from support.small import small_trainer

STEPS_PER_EPOCH = 5


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in it, but for the lock."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# --- a save that falls on an epoch's end ------------------------------------------------------------------------------


def by_epochs(output_dir: Path, *callbacks: ds.Callback, **settings: Any) -> ds.Trainer:
    """Evaluates at each epoch's end, and saves every five steps, which is the same place."""
    usual = {"max_steps": 3 * STEPS_PER_EPOCH, "eval_strategy": "epoch", "save_steps": STEPS_PER_EPOCH}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    return small_trainer(output_dir, *callbacks, model=Line(), parts=parts, **{**usual, **settings})


def with_norms(output_dir: Path) -> ds.Trainer:
    return by_epochs(output_dir, GradNormLogger(), JsonLogger())


def test_one_checkpoint_holds_the_step_and_the_evaluation_behind_it(tmp_path: Path) -> None:
    journal = Journal(note=lambda ctx: ctx.state.global_step)
    by_epochs(tmp_path, journal, save_in_background=False).train()
    actions = [note for note in journal.notes if note[0] in ("evaluate", "save")]
    assert actions == [(event, step) for step in (5, 10, 15) for event in ("evaluate", "save")]


def test_a_kill_right_behind_that_checkpoint_costs_no_record(tmp_path: Path) -> None:
    plan = FaultPlan(event=Event.STEP_BEGIN, count=STEPS_PER_EPOCH + 1)
    assert_resume_equivalent(with_norms, [plan], folder=tmp_path)
    norms = (tmp_path / "killed/logs/gradient_norms.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in norms] == [5, 10, 15]


def test_a_run_stopped_for_its_evaluation_goes_on_behind_it(tmp_path: Path) -> None:
    def leg() -> ds.TrainResult:
        detector = DivergenceDetector(smoothing=1.0, threshold=1.0, patience=1, warmup=1, use_eval_loss=True)
        return by_epochs(tmp_path, Listener({"on_log_step": worsen}, name="worsen"), detector).train(
            continue_stopped=True
        )

    def worsen(ctx: Any) -> None:
        if ctx.kind == "eval":
            ctx.logs["eval_loss"] = float(ctx.state.global_step)

    ends = [(result.global_step, result.reason) for result in (leg(), leg())]
    assert ends == [(10, "stopped"), (15, "stopped")]


def test_the_best_checkpoint_outlives_a_limit_of_one(tmp_path: Path) -> None:
    def leave_the_best(ctx: Any) -> None:
        with torch.no_grad():
            ctx.model.layer.weight.fill_(1.0 + 0.1 * ctx.state.global_step)

    spoiler = Listener({"on_optimizer_step": leave_the_best})
    trainer = by_epochs(tmp_path, spoiler, save_total_limit=1, load_best_model_at_end=True)
    assert trainer.train().reason == "finished"
    assert trainer.state.best_model_checkpoint == "checkpoints/step-00000005"
    assert saved_steps(tmp_path / "checkpoints") == [5, 15]


# --- several ranks ----------------------------------------------------------------------------------------------------


def normed(output_dir: Path, parallel: str) -> ds.Trainer:
    torch.manual_seed(0)
    return small_trainer(
        output_dir,
        JsonLogger(),
        # with statistics that each rank gathers from batches of its own
        model=Layered(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        length=64,
        parts={"eval_dataset": tiny_regression_data(8, seed=1)},
        parallel=parallel,
        max_steps=12,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_steps=1,
        save_steps=3,
    )


def normed_ddp(output_dir: Path) -> ds.Trainer:
    return normed(output_dir, "ddp")


def normed_fsdp(output_dir: Path) -> ds.Trainer:
    return normed(output_dir, "fsdp")


@pytest.mark.parametrize("factory", [normed_ddp, normed_fsdp])
def test_batch_statistics_of_ranks_are_resumed(tmp_path: Path, factory: Callable[[Path], ds.Trainer]) -> None:
    """DDP shares rank 0's at each step, FSDP does not."""
    kills = [FaultPlan(event=Event.STEP_BEGIN, count=5), FaultPlan(event=Event.STEP_BEGIN, count=4)]
    assert_resume_equivalent(factory, kills, folder=tmp_path, world_size=2)


def evaluate_every_ten(output_dir: Path) -> list[int]:
    evaluated: list[int] = []

    def request_evaluation(ctx: Any) -> None:
        ctx.control.should_evaluate = ctx.state.global_step % 10 == 0

    handlers = {"on_step_end": request_evaluation, "on_evaluate": lambda ctx: evaluated.append(ctx.state.global_step)}
    parts = {"eval_dataset": tiny_regression_data(4, seed=1)}
    small_trainer(output_dir, Listener(handlers), model=Line(), parts=parts, parallel="ddp", max_steps=35).train()
    return evaluated


def test_a_request_is_met_at_its_step_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(evaluate_every_ten, 2, tmp_path) == [[10, 20, 30]] * 2


def stop_at_the_very_end(output_dir: Path, max_steps: int) -> tuple[Any, ...]:
    def stop(ctx: Any) -> None:
        if collectives.rank() == 1 and ctx.state.global_step == max_steps:
            ctx.control.stop("rank 1 says so")

    listener = Listener({"on_step_end": stop}, name="late")
    result = small_trainer(output_dir, listener, model=Line(), length=48, parallel="ddp", max_steps=max_steps).train()
    return result.global_step, result.reason, result.why, result.stopped_by


@pytest.mark.parametrize("max_steps", [4, 6], ids=["inside an epoch", "at an epoch's end"])
def test_a_stop_at_the_last_step_is_told_alike_on_every_rank(tmp_path: Path, max_steps: int) -> None:
    ends = run_ranks(stop_at_the_very_end, 2, tmp_path, max_steps)
    assert ends == [(max_steps, "stopped", "rank 1 says so", "late")] * 2


# --- requests ---------------------------------------------------------------------------------------------------------


def test_epochs_cut_short_count_as_epochs(tmp_path: Path) -> None:
    begun: list[int] = []

    def cut(ctx: Any) -> None:
        ctx.control.should_epoch_stop = ctx.state.global_step % 2 == 0

    listener = Listener({"on_step_end": cut, "on_epoch_begin": lambda ctx: begun.append(ctx.epoch)})
    result = small_trainer(tmp_path, listener, num_train_epochs=2).train()
    assert (begun, result.global_step, result.reason) == ([0, 1], 4, "finished")


def test_a_stop_asked_for_while_loading_lets_one_step_pass(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=2, save_steps=2).train()
    hasty = Listener({"on_load": lambda ctx: ctx.control.stop("too soon")}, name="hasty")
    result = small_trainer(tmp_path, hasty, max_steps=8, save_steps=2).train()
    assert (result.global_step, result.reason, result.stopped_by) == (3, "stopped", "hasty")


def test_an_evaluation_before_training_is_no_best_model(tmp_path: Path) -> None:
    trainer = by_epochs(tmp_path)
    assert "eval_loss" in trainer.evaluate()
    assert trainer.state.best_metric is None
    trainer.train()
    assert trainer.state.best_global_step > 0


# --- what is left behind ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a signal, inside this process."""


def kill_at_rename(number: int) -> Callable[[str, Path], None]:
    left = iter(range(1, number))

    def watch(operation: str, path: Path) -> None:
        if operation == "rename" and next(left, None) is None:
            raise Killed

    return watch


def test_a_model_that_was_only_loaded_cannot_start_over(tmp_path: Path) -> None:
    small_trainer(tmp_path, max_steps=4, save_steps=2).train()
    trainer = small_trainer(tmp_path, max_steps=4, save_steps=2)
    assert trainer.train().reason == "finished"
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError, match="this model is trained already"):
        trainer.train(False)
    assert contents(tmp_path) == before


def test_a_start_over_that_is_killed_half_way_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_at: list[int] = []

    def leg(resume: bool = True) -> ds.TrainResult:
        begin = Listener({"on_train_begin": lambda ctx: begun_at.append(ctx.state.global_step)})
        return small_trainer(tmp_path, JsonLogger(), begin, max_steps=4, logging_steps=1, save_steps=2).train(resume)

    leg()
    before = contents(tmp_path)
    del before["run.json"]  # the run's diary, which goes on
    monkeypatch.setattr(filesystem, "watcher", kill_at_rename(3))  # after the choice and the checkpoints
    with pytest.raises(Killed):
        leg(resume=False)
    monkeypatch.setattr(filesystem, "watcher", None)
    assert not (tmp_path / "checkpoints").exists(), "it was killed in between"
    assert leg().global_step == 4
    assert begun_at == [0, 0]
    assert set(before.values()) <= set(contents(tmp_path).values())


def test_the_checkpoint_of_another_run_leaves_all_of_this_one_behind(tmp_path: Path) -> None:
    def run(name: str, max_steps: int, *callbacks: ds.Callback) -> ds.Trainer:
        return small_trainer(tmp_path / name, *callbacks, max_steps=max_steps, save_steps=2)

    run("other", 4).train()
    run("own", 6).train()
    begun_at: list[int] = []
    begin = Listener({"on_step_begin": lambda ctx: begun_at.append(ctx.state.global_step)})
    run("own", 8, begin).train(tmp_path / "other/checkpoints/step-00000004")
    assert begun_at == [4, 5, 6, 7]
    assert saved_steps(tmp_path / "own/rewound/timeline.0001/checkpoints") == [2, 4, 6]
    assert saved_steps(tmp_path / "own/checkpoints") == [6, 8]


def test_a_log_in_a_folder_of_its_own_is_compared(tmp_path: Path) -> None:
    for name in ("first", "second"):
        small_trainer(tmp_path / name, JsonLogger(path="m/t.jsonl"), max_steps=2, logging_steps=1, save_steps=2).train()
    assert compare_runs(tmp_path / "first", tmp_path / "second").identical
    log = tmp_path / "second/m/t.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    next(record for record in records if "loss" in record)["loss"] += 1.0
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    differing = [row.what for row in compare_runs(tmp_path / "first", tmp_path / "second").rows if not row.identical]
    assert differing == ["m/t.jsonl"]


@pytest.mark.parametrize("place", ["rewound/timeline.0001", "logs/rewound"])
def test_going_back_may_be_interrupted_between_logs_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before the first operation there: logs are cut once training begins, so they reach as far as any checkpoint."""

    class Killed(BaseException):
        pass

    def kill(operation: str, path: Path) -> None:
        if path.is_relative_to(tmp_path / "run" / place):
            raise Killed

    with_norms(tmp_path / "whole").train()
    with_norms(tmp_path / "run").train()
    with monkeypatch.context() as killing, pytest.raises(Killed):
        killing.setattr(filesystem, "watcher", kill)
        with_norms(tmp_path / "run").train(tmp_path / "run" / "checkpoints" / "step-00000005")
    with_norms(tmp_path / "run").train()
    comparison = compare_runs(tmp_path / "whole", tmp_path / "run")
    assert comparison.identical, comparison.table()
