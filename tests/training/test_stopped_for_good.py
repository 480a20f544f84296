"""A stop by a callback that judges the training to be over is the run's end, until the user asks for more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import (
    CheckLoss,
    DivergenceDetector,
    EarlyStopping,
    InfoCallback,
    JsonLogger,
)
from dalsegno.cli import main
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.logs import RunFile
from dalsegno.testing import FaultPlan, compare_runs, run_ranks, start_ranks, tiny_regression_data
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.small import same, small_trainer, weights
from support.zero import warnings_about_broken_weights


def stopping(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """An evaluation and a checkpoint every two steps, and a callback that is never content: it stops at step 4."""
    return small_trainer(
        output_dir,
        *(callbacks or [EarlyStopping(patience=1, min_delta=100.0)]),
        parts={"eval_dataset": tiny_regression_data(6, seed=1)},
        **{"max_steps": 20, "eval_steps": 2, "save_steps": 2, "lr_scheduler_type": "constant", **settings},
    )


def legs(output_dir: Path) -> list[tuple[int, int, str | None]]:
    record = RunFile(output_dir).load()
    assert record is not None
    return [(leg.first_step, leg.last_step, leg.by) for leg in record.legs]


def test_run_again_it_does_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = stopping(tmp_path)
    result = first.train()
    assert (result.global_step, result.reason, result.stopped_by) == (4, "stopped", "EarlyStopping")
    again = stopping(tmp_path)
    assert again.train() == result
    assert first.train() == result  # in the same program, too
    assert same(weights(again), weights(first))
    assert legs(tmp_path) == [(0, 4, "EarlyStopping")]
    assert caplog.messages.count(caplog.messages[-1]) == 2
    assert caplog.messages[-1].startswith("stopped at step 4 already, by EarlyStopping: eval_loss was best at step 2")
    assert caplog.messages[-1].endswith(
        "train further, raise max_steps or num_train_epochs, whichever the run ends by, or pass continue_stopped=True"
    )


@pytest.mark.parametrize("how", ["more steps", "continue_stopped", "a path", "anew"])
def test_the_user_may_ask_for_more(tmp_path: Path, how: str) -> None:
    stopping(tmp_path).train()
    if how == "more steps":
        result = stopping(tmp_path, max_steps=21).train()
    elif how == "continue_stopped":
        result = stopping(tmp_path).train(continue_stopped=True)
    else:
        newest = tmp_path / "checkpoints/step-00000004"
        result = stopping(tmp_path).train(str(newest) if how == "a path" else False)
    assert (result.global_step, result.stopped_by) == (4 if how == "anew" else 6, "EarlyStopping")


def test_a_run_by_epochs_goes_on_with_more_of_them(tmp_path: Path) -> None:
    by_epochs = {"max_steps": -1, "num_train_epochs": 3}
    assert stopping(tmp_path, **by_epochs).train().global_step == 4
    assert stopping(tmp_path, **by_epochs).train().global_step == 4
    assert stopping(tmp_path, **by_epochs | {"num_train_epochs": 4}).train().global_step == 6


def diverging(ctx: Any) -> None:
    if ctx.kind == "train" and ctx.state.global_step >= 3:
        ctx.logs["loss"] = float("nan")


@pytest.mark.parametrize("saves", [True, False])
def test_a_divergence_is_the_end_with_or_without_a_checkpoint(tmp_path: Path, saves: bool) -> None:
    settings = {"eval_steps": 0, "logging_steps": 1, "save_steps": 2 if saves else 10}
    own = Listener({"on_log_step": diverging}), DivergenceDetector(action="abort"), JsonLogger()
    result = stopping(tmp_path, *own, **settings).train()
    assert (result.global_step, result.reason) == (3, "aborted")
    before = (tmp_path / "logs/train.jsonl").read_bytes()
    assert stopping(tmp_path, *own, **settings).train() == result
    assert (tmp_path / "logs/train.jsonl").read_bytes() == before
    assert len(legs(tmp_path)) == 1


class BreaksOnce:
    """Spoils the weights at the end of step 5, when it comes there for the first time."""

    is_over = False

    def __call__(self, ctx: Any) -> None:
        if ctx.step == 5 and not self.is_over:
            self.is_over = True
            with torch.no_grad():
                next(ctx.model.parameters()).fill_(float("nan"))


@pytest.mark.parametrize("final", [True, False])
def test_after_an_abort_the_same_trainer_goes_on_from_its_checkpoint(tmp_path: Path, final: bool) -> None:
    """As a new one would: what is in memory was not to be kept."""

    def abort(ctx: Any) -> None:
        if ctx.step == 5 and not next(ctx.model.parameters()).isfinite().all():
            ctx.control.stop("broken", save=False, final=final)

    def trainer(folder: str, *callbacks: Any) -> ds.Trainer:
        return stopping(tmp_path / folder, *callbacks, JsonLogger(), eval_steps=0, max_steps=10)

    broken = trainer("broken", Listener({"on_step_end": BreaksOnce()}), Listener({"on_step_end": abort}, name="judge"))
    assert broken.train().reason == "aborted"
    result = broken.train(continue_stopped=final)
    assert (result.global_step, result.reason) == (10, "finished")
    whole = trainer("whole", Listener({}), Listener({}, name="judge"))
    whole.train()
    assert same(weights(broken), weights(whole))
    assert legs(tmp_path / "broken") == [(0, 5, "judge"), (4, 10, None)]


def test_an_abort_without_a_checkpoint_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    trainer = stopping(
        tmp_path, Listener({"on_step_end": lambda ctx: ctx.control.stop("no", save=False)}), save_steps=0
    )
    trainer.train()
    with pytest.raises(
        ds.ConfigurationError, match=r"aborted or interrupted .* no checkpoint to resume from; build a new"
    ):
        trainer.train()


def test_broken_weights_in_memory_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were saved with the rest, so the run resumes with them."""
    trainer = stopping(tmp_path, Listener({"on_step_end": BreaksOnce()}), eval_steps=0, max_steps=6)
    trainer.train()
    trainer.args.max_steps = 8
    trainer.train()
    assert "weights contain NaN or infinity as training begins at step 6; to resume from before" in caplog.text


def test_broken_weights_are_reported_by_one_rank(tmp_path: Path) -> None:
    zero, one = run_ranks(warnings_about_broken_weights, 2, tmp_path)
    assert (len(zero), len(one)) == (1, 0)


def test_a_check_that_aborts_is_final_too(tmp_path: Path) -> None:
    class Broken(ds.Callback):
        def on_after_forward(self, ctx: Any) -> None:
            ctx.outputs["loss"] = ctx.outputs["loss"] * float("nan")

    own = [CheckLoss(), Broken()]
    result = stopping(tmp_path, *own, logging_steps=1).train()
    assert result.reason in ("stopped", "aborted")
    assert stopping(tmp_path, *own, logging_steps=1).train().global_step == result.global_step
    assert len(legs(tmp_path)) == 1


def test_a_signal_or_a_pause_is_not(tmp_path: Path) -> None:
    def pause(ctx: Any) -> None:
        if ctx.step == 3:
            ctx.control.stop("for now")
        if ctx.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    own = Listener({"on_step_end": pause}, name="pause")
    steps = [stopping(tmp_path, own, max_steps=8).train().global_step for _ in range(3)]
    assert steps == [3, 5, 8]
    assert legs(tmp_path) == [(0, 3, "pause"), (3, 5, "signal"), (5, 8, None)]


def test_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    def loop() -> OwnLoop:
        return OwnLoop(tmp_path, EarlyStopping(patience=1, min_delta=1e6), eval_steps=2)

    result = loop().train()
    assert result is not None and result.global_step == 4
    with loop().run() as run:
        assert list(run.batches()) == []
    assert run.result == result


def judged_on_one_rank(output_dir: Path) -> list[tuple[int, str | None]]:
    def judge(ctx: Any) -> None:
        if collectives.rank() == 1 and ctx.step == 2:
            ctx.control.stop("seen by rank 1", final=True)

    own = Listener({"on_step_end": judge}, name="judge")
    results = [small_trainer(output_dir, own, max_steps=6, save_steps=2).train() for _ in range(2)]
    return [(result.global_step, result.why) for result in results]


def test_all_ranks_know_of_it(tmp_path: Path) -> None:
    ends = run_ranks(judged_on_one_rank, 2, tmp_path)
    assert ends == [[(2, "seen by rank 1")] * 2] * 2


def test_the_result_tells_the_best_and_which_weights_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([5.0, 2.0, 3.0, 4.0])

    def script(ctx: Any) -> None:
        if ctx.kind == "eval":
            ctx.logs["eval_loss"] = next(losses)

    def trainer(output_dir: Path, **settings: Any) -> ds.Trainer:
        own = [Listener({"on_log_step": script}), EarlyStopping(patience=2), InfoCallback()]
        return stopping(output_dir, *own, **settings)

    result = trainer(tmp_path / "run").train()
    best = tmp_path / "run/checkpoints/step-00000004"
    assert (result.global_step, result.best_step, result.best_metric, result.best_checkpoint) == (8, 4, 2.0, best)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("step-00000008; in memory: the last weights, not the best (eval_loss 2 at step 4)")
    assert trainer(tmp_path / "run").train() == result

    assert main(["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--best"]) == 0
    assert ds.export_model(best, tmp_path / "same").size > 0
    exported = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "same")]
    assert exported[0] == exported[1]

    losses = iter([5.0, 2.0, 3.0, 4.0])
    result = trainer(tmp_path / "loaded", load_best_model_at_end=True).train()
    assert "in memory: the best weights (eval_loss 2 at step 4)" in capsys.readouterr().out

    losses = iter([5.0, 2.0, 3.0, 4.0])
    result = trainer(tmp_path / "unsaved", save_steps=8).train()
    assert (result.best_step, result.best_checkpoint) == (4, None)
    with pytest.raises(ds.NotFound, match="step-00000004: the checkpoint of the best evaluation"):
        ds.export_model(tmp_path / "unsaved", tmp_path / "none", best=True)


# --- killed on its way out --------------------------------------------------------------------------------------------


class Judge(ds.Callback):
    """Ends the run at the end of step 6, on the last rank alone."""

    def __init__(self, how: dict[str, bool]) -> None:
        self._how = how

    def on_step_end(self, ctx: Any) -> None:
        if ctx.step != 6 or collectives.rank() != collectives.world_size() - 1:
            return
        if self._how:
            ctx.control.stop("enough", **self._how)
        else:
            ctx.control.should_training_stop = True


JUDGES: dict[str, Any] = {
    "early stopping": lambda: EarlyStopping(patience=1, min_delta=100.0),
    "final": lambda: Judge({"final": True}),
    "diverged": lambda: Judge({"diverged": True}),
    "bare flag": lambda: Judge({}),
    "abort": lambda: Judge({"final": True, "save": False}),
}
AT_THE_END = FaultPlan(event=Event.TRAIN_END)


def judged(output_dir: Path, judge: str, plan: FaultPlan | None, options: dict[str, Any]) -> tuple[Any, ...]:
    """One leg, killed by ``plan``; what its result tells."""
    if plan is not None:
        plan.arm()
    result = stopping(output_dir, JUDGES[judge](), JsonLogger(), max_steps=12, logging_steps=1).train(**options)
    return result.global_step, result.reason, result.stopped_by, result.why, result.exit_status


def leg(output_dir: Path, judge: str, plan: FaultPlan | None = None, *, ranks: int = 1, **options: Any) -> Any:
    """As :func:`judged`, on each rank; None if it was killed."""
    outcomes = start_ranks(judged, ranks, output_dir, judge, plan, options).wait()
    if any(outcome.was_killed for outcome in outcomes):
        return None
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("judge", JUDGES)
def test_killed_in_on_train_end_it_stays_ended(tmp_path: Path, judge: str) -> None:
    """The leg that gave up the run is killed, then the one that ends it: nothing is trained, and no record differs."""
    whole = leg(tmp_path / "whole", judge)
    assert leg(tmp_path / "parts", judge, AT_THE_END) is None
    assert leg(tmp_path / "parts", judge, AT_THE_END) is None
    assert [leg(tmp_path / "parts", judge) for _ in range(2)] == [whole, whole]
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, comparison.table()
    assert len(legs(tmp_path / "parts")) == 3, "the last start found it ended"


def test_killed_before_each_change_of_run_json(tmp_path: Path) -> None:
    whole, count = leg(tmp_path / "whole", "final"), 0
    while True:
        count += 1
        output_dir = tmp_path / f"parts-{count}"
        if leg(output_dir, "final", FaultPlan(operation="any", path="run.json", count=count)) is not None:
            break
        assert leg(output_dir, "final") == whole
        assert compare_runs(tmp_path / "whole", output_dir).identical
    assert count > 15


def test_killed_on_two_ranks(tmp_path: Path) -> None:
    whole = leg(tmp_path / "whole", "final", ranks=2)
    assert leg(tmp_path / "parts", "final", AT_THE_END, ranks=2) is None
    assert leg(tmp_path / "parts", "final", ranks=2) == whole
    assert compare_runs(tmp_path / "whole", tmp_path / "parts").identical


def test_who_asked_for_more_need_not_ask_again_after_a_kill(tmp_path: Path) -> None:
    """Also not if the leg was killed before its first checkpoint; the next end is one again."""
    assert leg(tmp_path, "early stopping") is not None
    assert leg(tmp_path, "early stopping", FaultPlan(event=Event.STEP_END), continue_stopped=True) is None
    assert [leg(tmp_path, "early stopping")[0][0] for _ in range(2)] == [6, 6]
    assert [(first, last) for first, last, _ in legs(tmp_path)] == [(0, 4), (4, 4), (4, 6)]


def test_an_exception_on_its_way_out_does_not_continue_it(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        if ctx.kind == "final":
            raise RuntimeError("no disk today")

    judge = Judge({"final": True})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no disk"):
            stopping(tmp_path, judge, Listener({"on_log": fail})).train()
    assert stopping(tmp_path, judge).train().global_step == 6
    assert legs(tmp_path) == [(0, 6, "Judge"), (6, 6, "Judge"), (6, 6, "Judge")]
