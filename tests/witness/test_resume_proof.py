"""The proof of a resumed leg: what it says of steps that are repeated as they were, and of the first that is not."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.logs import RunFile
from dalsegno.state import CAUSES, ResumeProof
from dalsegno.system.exit_status import ExitStatus
from dalsegno.testing import FaultPlan, compare_runs, run_ranks, start_ranks
from support.crash import Crash
from support.held_saves import hold_save
from support.listeners import Listener
from support.rolling import Sniffer, rolling, samples_of_step
from support.small import small_trainer

Build = Callable[..., ds.Trainer]
"""``build(output_dir, *callbacks)``."""


def trainer(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """A checkpoint after steps 4 and 8 of ten, five of them an epoch."""
    usual: dict[str, Any] = {"max_steps": 10, "save_steps": 4, "logging_steps": 2, "max_grad_norm": 1.0}
    usual |= {"save_in_background": False, "lr_scheduler_type": "constant"}
    return small_trainer(output_dir, JsonLogger(), *callbacks, **usual | settings)


def crash(build: Build, output_dir: Path, after: int = 7) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        build(output_dir, Crash(after)).train()


def proof_of(built: ds.Trainer) -> ResumeProof:
    """The proof after a leg's end: the trainer's, which is the one in run.json."""
    assert built.state.resume_proof is not None
    assert built.state.resume_proof == recorded(built.args.directory)
    return built.state.resume_proof


def recorded(output_dir: Path) -> ResumeProof | None:
    run = RunFile(output_dir).load()
    assert run is not None
    return run.legs[-1].resumed


def resumed(build: Build, output_dir: Path, after: int = 7) -> ResumeProof:
    """The proof of the leg that follows one which crashed after that many steps."""
    crash(build, output_dir, after)
    last = build(output_dir)
    last.train()
    return proof_of(last)


def from_here(handlers: dict[str, Callable[[Any], None]]) -> Build:
    """Runs of a callback with these handlers: the same functions in both legs, with a state that none saves."""

    def build(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        return trainer(output_dir, Listener(handlers, name="caller"), *callbacks)

    return build


def test_steps_that_are_repeated_bit_for_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dalsegno")
    proof = resumed(trainer, tmp_path)
    assert (proof.verdict, proof.first_step, proof.last_step, proof.every) == ("exact", 5, 7, 1)
    assert proof.line == "resumed exactly: steps 5 to 7 repeated bit for bit"
    assert [each.levelname for each in caplog.records if each.message == proof.line] == ["INFO"]
    assert json.loads((tmp_path / "run.json").read_text())["legs"][1]["resumed"]["verdict"] == "exact"
    (log,) = ds.open_log(tmp_path)
    assert [log.lineage()[0].redone, log.restarts()[0].redone] == [3, 3], "the log of the leg before ends at step 6"


def test_records_of_a_late_on_save_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first leg the disk holds the save of step 4 until step 6; the second leg fires its on_save at once."""
    note = Listener({"on_save": lambda ctx: ctx.trainer.log({"saved": ctx.step})}, name="note")

    def build(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        return trainer(output_dir, note, *callbacks, logging_steps=1, on_resume="stop", save_in_background=True)

    with monkeypatch.context() as patch:
        hold = hold_save(patch, 4, until=6)
        crash(lambda *given: build(*given, hold), tmp_path)
    last = build(tmp_path)
    last.train()
    assert proof_of(last).line == "resumed exactly: steps 5 to 7 repeated bit for bit"
    (log,) = ds.open_log(tmp_path)
    assert [record["saved"] for record in log.records() if record["kind"] == "save"] == [4, 8, 10]
    whole = tmp_path.with_name(f"{tmp_path.name}-whole")
    build(whole).train()
    comparison = compare_runs(whole, tmp_path)
    assert comparison.identical, comparison.table()


def test_a_leg_that_does_not_resume_has_no_proof(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train()
    assert first.state.resume_proof is None and recorded(tmp_path) is None
    again = trainer(tmp_path)
    again.train(False)
    assert again.state.resume_proof is None and recorded(tmp_path) is None


def test_after_a_stop_nothing_is_repeated(tmp_path: Path) -> None:
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("mid-way") if ctx.step == 6 else None}, name="stop")
    trainer(tmp_path, stop).train()
    last = trainer(tmp_path)
    last.train()
    proof = proof_of(last)
    assert (proof.verdict, proof.line) == (
        "not proven",
        "not proven: the leg before recorded no step after the checkpoint",
    )


def test_a_leg_that_ends_before_it_has_repeated_a_step(tmp_path: Path) -> None:
    crash(trainer, tmp_path)
    crash(trainer, tmp_path, after=4)
    proof = recorded(tmp_path)
    assert proof is not None and proof.verdict == "not proven"
    last = trainer(tmp_path)
    last.train()
    assert proof_of(last).line == "resumed exactly: steps 5 to 7 repeated bit for bit", "of the leg before the last"


# -- what differs first -----------------------------------------------------------------------------------------------

LAST_STEP = itertools.count(1)
"""Of this process: a state that no checkpoint contains."""


def other_data(ctx: Any) -> None:
    ctx.batch["x"].add_(next(LAST_STEP) / 100)


def other_numbers(draw: Callable[[], object]) -> dict[str, Callable[[Any], None]]:
    """Draws at the end of the first step of each leg that resumes: events outside of the steps shift no numbers."""
    waiting = []

    def begin(ctx: Any) -> None:
        waiting[:] = [ctx.resumed_from] * (ctx.resumed_from is not None)

    def step(ctx: Any) -> None:
        if waiting:
            waiting.clear()
            draw()

    return {"on_train_begin": begin, "on_step_end": step}


def other_gradients(ctx: Any) -> None:
    for parameter in ctx.model.parameters():
        parameter.grad.mul_(1.0 + 1.0 / next(LAST_STEP))


def other_rate(ctx: Any) -> None:
    ctx.optimizer.param_groups[0]["lr"] = 0.01 / next(LAST_STEP)


def other_record(ctx: Any) -> None:
    if ctx.kind == "train":
        ctx.logs["calls"] = next(LAST_STEP)


def other_loss(ctx: Any) -> None:
    ctx.outputs["loss"] = ctx.outputs["loss"] * (1.0 + 1.0 / next(LAST_STEP))


@pytest.mark.parametrize(
    ("handlers", "what", "step", "words"),
    [
        (other_numbers(lambda: torch.rand(1)), "random numbers", 6, "from torch's generator; "),
        (other_numbers(np.random.random), "random numbers", 6, "from NumPy's generator; "),
        (other_numbers(random.random), "random numbers", 6, "from Python's generator; "),
        ({"on_before_backward": other_loss}, "loss", 5, r"\d\S+ before, \d\S+ now; "),
        ({"on_gradients_ready": other_gradients}, "gradient norm", 5, r"\d\S+ before, \d\S+ now; "),
        ({"on_step_begin": other_rate}, "learning rate", 5, r"0\.002 before, 0\.0011\d* now; "),
        ({"on_log_step": other_record}, "record", 6, r"calls in train\.jsonl 3 before, 4 now; "),
    ],
)
def test_what_differs_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    handlers: dict[str, Callable[[Any], None]],
    what: str,
    step: int,
    words: str,
) -> None:
    monkeypatch.setitem(globals(), "LAST_STEP", itertools.count(1))
    proof = resumed(from_here(handlers), tmp_path)
    assert (proof.verdict, proof.what, proof.differs_at, proof.first_step) == ("differs", what, step, 5)
    counter = r"(; other_\w+\(\): LAST_STEP was another as the leg began)?"
    assert proof.why is not None and re.fullmatch(words + re.escape(CAUSES[what]) + counter, proof.why)
    assert re.match(f"not resumed exactly: {what} of step {step} differs?: ", proof.line)
    said = [each for each in caplog.records if each.message == proof.line]
    assert [each.levelname for each in said] == ["WARNING"], "once"


def test_other_data(tmp_path: Path) -> None:
    class Counting:
        calls = 0

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            Counting.calls += 1
            return {"x": torch.full((8,), Counting.calls / 10), "y": torch.zeros(1)}

    def build(output_dir: Path, *callbacks: Any) -> ds.Trainer:
        return trainer(output_dir, *callbacks, parts={"train_dataset": Counting()})

    proof = resumed(build, tmp_path)
    assert (proof.verdict, proof.what, proof.differs_at, proof.why) == ("differs", "data", 5, CAUSES["data"])


def test_after_the_first_difference_steps_are_recorded_anew(tmp_path: Path) -> None:
    """What came out of the leg before the last is not what the next one repeats."""
    scale = {"loss": 1.0}

    def scaled(ctx: Any) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * scale["loss"]

    build = from_here({"on_before_backward": scaled})
    crash(build, tmp_path)
    scale["loss"] = 2.0
    crash(build, tmp_path)
    proof = recorded(tmp_path)
    assert proof is not None and (proof.verdict, proof.differs_at) == ("differs", 5)
    last = build(tmp_path)
    last.train()
    assert (proof_of(last).verdict, proof_of(last).last_step) == ("exact", 7)


# -- on_resume --------------------------------------------------------------------------------------------------------


def drawing(output_dir: Path, *callbacks: Any, on_resume: str = "stop", draws: bool = True) -> ds.Trainer:
    draw = Listener(other_numbers(lambda: draws and torch.rand(1)), name="draws")
    return trainer(output_dir, draw, *callbacks, on_resume=on_resume)


def test_stopped_if_it_differs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    crash(drawing, run)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    for attempt in range(2):
        leg = drawing(run)
        result = leg.train()
        assert (result.stopped_by, result.exit_status) == ("on_resume", ExitStatus.ERROR), f"attempt {attempt}"
        assert result.global_step == 6 and result.why == proof_of(leg).line
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    mended = drawing(run, draws=False)
    assert mended.train().reason == "finished"
    assert (proof_of(mended).verdict, proof_of(mended).last_step) == ("exact", 7)
    trainer(tmp_path / "whole", Listener({}, name="draws")).train()
    assert compare_runs(tmp_path / "whole", run).identical


def test_a_difference_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash(drawing, tmp_path)
    leg = drawing(tmp_path, on_resume="ignore")
    assert leg.train().reason == "finished"
    assert proof_of(leg).verdict == "differs"
    assert not [each for each in caplog.records if each.message == proof_of(leg).line]


@pytest.mark.parametrize("on_resume", ["warn", "stop"])
def test_a_changed_setting_explains_a_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_resume: str
) -> None:
    crash(trainer, tmp_path)
    leg = trainer(tmp_path, learning_rate=0.02, on_resume=on_resume)
    assert leg.train().reason == "finished"
    proof = proof_of(leg)
    assert (proof.verdict, proof.what, proof.differs_at) == ("changed", "learning rate", 5)
    assert proof.line == (
        "not repeated bit for bit: learning rate of step 5 differs: learning_rate: saved 0.01, now 0.02"
    )
    assert not [each for each in caplog.records if each.message == proof.line and each.levelno >= logging.WARNING]


def test_a_changed_setting_that_changes_no_step(tmp_path: Path) -> None:
    crash(trainer, tmp_path)
    leg = trainer(tmp_path, save_steps=2, max_steps=12)
    leg.train()
    assert proof_of(leg).verdict == "exact"


# -- several ranks ----------------------------------------------------------------------------------------------------


class CountsOnRankOne(ds.Callback):
    """Changes on one rank only, and is not saved."""

    seen = 0

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.seen += collectives.rank()


def on_ranks(output_dir: Path, plan: FaultPlan | None, draws_on: int | None) -> tuple[str, list[str]]:
    """A leg in which one rank draws a number that it did not draw before; the proof and what was logged."""
    if plan is not None and collectives.rank() == 0:
        plan.arm()
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)

    def draw() -> None:
        if collectives.rank() == draws_on:
            torch.rand(1)

    ranks = collectives.world_size()
    parallel = {"parallel": "ddp"} if ranks > 1 else {}
    leg = trainer(
        output_dir,
        Listener(other_numbers(draw), name="draws"),
        CountsOnRankOne(),
        per_device_train_batch_size=4 // ranks,
        **parallel,
    )
    leg.train()
    proof = leg.state.resume_proof
    return "" if proof is None else proof.line, lines


KILL = FaultPlan(event=ds.Event.STEP_BEGIN, count=8)


def test_what_differs_on_one_rank_is_said_and_recorded(tmp_path: Path) -> None:
    assert start_ranks(on_ranks, 2, tmp_path, KILL, None).wait()[0].was_killed
    (first, logged), (second, logged_there) = run_ranks(on_ranks, 2, tmp_path, None, 1)
    proof = recorded(tmp_path)
    assert proof is not None and first == second == proof.line
    assert (proof.verdict, proof.what, proof.differs_at) == ("differs", "random numbers", 6)
    assert proof.why is not None and proof.why.startswith("on rank 1, from torch's generator; ")
    assert logged_there == [proof.line]
    assert logged == [logged[0], proof.line] and "rank 0" in logged[0], "its gradients differ because of the other's"


def test_two_ranks_repeat_their_steps(tmp_path: Path) -> None:
    assert start_ranks(on_ranks, 2, tmp_path, KILL, None).wait()[0].was_killed
    found = run_ranks(on_ranks, 2, tmp_path, None, None)
    unsaved = "training changes CountsOnRankOne.seen, which no checkpoint contains"
    line = f"resumed exactly: steps 5 to 7 repeated bit for bit; the later steps are not proven, since {unsaved}"
    assert found == [(line, [])] * 2


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_is_a_known_reason(tmp_path: Path, before: int, now: int) -> None:
    assert start_ranks(on_ranks, before, tmp_path, KILL, None).wait()[0].was_killed
    found = run_ranks(on_ranks, now, tmp_path, None, None)
    proof = recorded(tmp_path)
    assert proof is not None and proof.verdict == "changed"
    assert f"world_size: saved {before}, now {now}" in (proof.why or "")
    assert all(line == proof.line and not [each for each in logged if each == line] for line, logged in found)
    assert not list((tmp_path / "witness").glob(f"*rank-{now:05d}*")), "files of ranks that are no more"


# -- kills and rollbacks ----------------------------------------------------------------------------------------------


def test_a_rollback_is_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within a leg, and when a leg that has gone back is resumed."""
    caplog.set_level(logging.INFO, logger="dalsegno")

    def build(*callbacks: Any) -> ds.Trainer:
        return rolling(tmp_path, JsonLogger(), Sniffer(samples_of_step(10)), *callbacks)

    with pytest.raises(RuntimeError, match="illegal"):
        build(Crash(13)).train()
    run = RunFile(tmp_path).load()
    assert run is not None and len(run.legs[-1].rollbacks) == 1
    assert not [each for each in caplog.records if "resumed exactly" in each.message or "bit for bit" in each.message]
    last = build()
    last.train()
    assert (proof_of(last).verdict, proof_of(last).last_step) == ("exact", 13)


def test_the_steps_from_before_a_rollback_are_forgotten(tmp_path: Path) -> None:
    """A leg that goes back from step 10 to 4, and crashes before it is where it was."""
    went_back: list[int] = []

    def crash_then(ctx: Any) -> None:
        if went_back and ctx.state.global_step == 7:
            raise RuntimeError("an illegal memory access")

    crasher = {"on_rollback": lambda ctx: went_back.append(ctx.from_step), "on_step_begin": crash_then}

    def build(*callbacks: Any) -> ds.Trainer:
        return rolling(tmp_path, JsonLogger(), Sniffer(samples_of_step(10)), *callbacks)

    with pytest.raises(RuntimeError, match="illegal"):
        build(Listener(crasher, name="crasher")).train()
    assert went_back == [10]
    last = build()
    last.train()
    assert (proof_of(last).verdict, proof_of(last).first_step, proof_of(last).last_step) == ("exact", 5, 7)


def test_killed_while_it_repeats_and_resumed_again(tmp_path: Path) -> None:
    """The steps that are left to be compared stay what the first leg made."""
    scale = {"loss": 1.0}

    def scaled(ctx: Any) -> None:
        if ctx.state.global_step == 6:
            ctx.outputs["loss"] = ctx.outputs["loss"] * scale["loss"]

    build = from_here({"on_before_backward": scaled})
    crash(build, tmp_path, after=7)
    crash(build, tmp_path, after=6)
    scale["loss"] = 2.0
    last = build(tmp_path)
    last.train()
    assert (proof_of(last).verdict, proof_of(last).what, proof_of(last).differs_at) == ("differs", "loss", 7)
