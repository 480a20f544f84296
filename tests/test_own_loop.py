"""``ds.Run`` around a hand-written loop: the same events, state and checkpoints as the Trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dalsegno as ds
from dalsegno.logs import read_records, timeless
from dalsegno.testing import FaultPlan, assert_resume_equivalent
from support.own_loops import OwnLoop


class Listener(ds.Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        self.heard.append("train_begin")

    def on_epoch_begin(self, ctx: ds.EpochContext) -> None:
        self.heard.append(f"epoch_begin {ctx.epoch}")

    def on_step_begin(self, ctx: ds.Context) -> None:
        self.heard.append("step_begin")

    def on_microbatch_begin(self, ctx: ds.MicrobatchBeginContext) -> None:
        self.heard.append(f"microbatch_begin {ctx.index} of {ctx.samples} samples")

    def on_pre_optimizer_step(self, ctx: ds.PreOptimizerStepContext) -> None:
        gradients = [parameter.grad is not None for parameter in ctx.model.parameters()]
        self.heard.append(f"pre_optimizer_step {all(gradients)}")

    def on_optimizer_step(self, ctx: ds.Context) -> None:
        self.heard.append("optimizer_step")

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.heard.append(f"step_end {ctx.step} lr {ctx.lr:g}")

    def on_train_end(self, ctx: ds.TrainEndContext) -> None:
        self.heard.append(f"train_end {ctx.reason}")


def test_killed_and_resumed_it_is_as_if_it_had_never_been_killed(tmp_path: Path) -> None:
    moments = [
        FaultPlan(event=ds.Event.STEP_END, count=3),  # before the first checkpoint
        FaultPlan(event=ds.Event.STEP_END, count=17),  # in the second epoch
        FaultPlan(operation="write", path=".partial", count=6),
    ]
    assert_resume_equivalent(OwnLoop, moments, folder=tmp_path)
    assert (tmp_path / "killed" / "logs" / "rewound").is_dir(), "nothing was ever rewound, so nothing was shown"


def test_events_come_in_order_with_gradients_and_the_rate_that_was_used(tmp_path: Path) -> None:
    listener = Listener()
    OwnLoop(tmp_path, listener, max_steps=2).train()
    assert listener.heard == [
        "train_begin",
        "epoch_begin 0",
        "step_begin",
        "microbatch_begin 0 of 4 samples",
        "pre_optimizer_step True",
        "optimizer_step",
        "step_end 1 lr 0.01",
        "step_begin",
        "microbatch_begin 0 of 4 samples",
        "pre_optimizer_step True",
        "optimizer_step",
        "step_end 2 lr 0.01",
        "train_end finished",
    ]


def test_a_finished_run_has_no_batches_left_and_tells_its_result(tmp_path: Path) -> None:
    first = OwnLoop(tmp_path).train()
    before = (tmp_path / "logs" / "train.jsonl").read_bytes()
    again = OwnLoop(tmp_path)
    with again.run() as run:
        assert list(run.batches()) == []
    assert run.result is not None and first is not None
    assert (run.result.reason, run.result.global_step, run.result.metrics) == ("finished", 40, first.metrics)
    assert (tmp_path / "logs" / "train.jsonl").read_bytes() == before


def test_a_callback_that_needs_what_the_loop_cannot_fire_is_refused(tmp_path: Path) -> None:
    class NeedsBackward(ds.Callback):
        def on_after_backward(self, ctx: ds.BackwardContext) -> None: ...

    with pytest.raises(ds.EventNotFired, match=r"NeedsBackward needs on_after_backward, which a loop around"):
        OwnLoop(tmp_path, NeedsBackward()).run()


def test_a_step_that_is_not_ended_is_an_error_that_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(ds.ConfigurationError, match=r"step 1 did not end: call run.step_end\(loss=…\)"),
        OwnLoop(tmp_path).run() as run,
    ):
        for _ in run.batches():
            pass


def test_a_step_that_has_not_begun_cannot_end(tmp_path: Path) -> None:
    with (
        pytest.raises(ds.ConfigurationError, match="no step has begun"),
        OwnLoop(tmp_path).run() as run,
    ):
        run.step_end(loss=torch.tensor(1.0))


def test_leaving_the_loop_early_is_told_as_such_and_can_be_gone_on_with(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path)
    with loop.run() as run:
        for batch in run.batches():
            run.step_end(loss=loop.update(batch))
            if run.state.global_step == 9:
                break
    assert run.result is not None
    assert (run.result.reason, run.result.stopped_by, run.result.global_step) == ("stopped", "the loop", 9)
    result = OwnLoop(tmp_path).train()
    assert result is not None and (result.reason, result.global_step) == ("finished", 40)


def test_an_exception_in_the_loop_ends_the_leg_and_goes_up_unchanged(tmp_path: Path) -> None:
    listener = Listener()
    loop = OwnLoop(tmp_path, listener)
    with pytest.raises(ZeroDivisionError), loop.run() as run:
        for _ in run.batches():
            _ = 1 / 0
    assert listener.heard[-1] == "train_end exception"
    assert run.result is not None and run.result.why == "ZeroDivisionError: division by zero"


def test_stop_save_and_log_from_within_the_loop(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path, save_steps=1000)
    with loop.run() as run:
        for batch in run.batches():
            if run.state.global_step == 4:
                run.save()
                run.log({"note": 4})
            if run.state.global_step == 8:
                run.stop("seen enough")
            run.step_end(loss=loop.update(batch))
    assert run.result is not None
    assert (run.result.reason, run.result.why, run.result.stopped_by) == ("stopped", "seen enough", "the program")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000009"]
    notes = [record for record in read_records(tmp_path / "logs" / "train.jsonl") if record.get("kind") == "user"]
    assert [(note["global_step"], note["note"]) for note in notes] == [(4, 4)]


def test_state_of_the_users_own_is_saved_by_name(tmp_path: Path) -> None:
    class Counter:
        total = 0

        def state_dict(self) -> dict[str, int]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.total = state["total"]

    def train(steps: int) -> Counter:
        loop, counter = OwnLoop(tmp_path, max_steps=steps), Counter()
        with ds.Run(
            loop.args, model=loop.model, optimizer=loop.optimizer, loader=loop.loader, state={"counter": counter}
        ) as run:
            for batch in run.batches():
                counter.total += 1
                run.step_end(loss=loop.update(batch))
        return counter

    assert train(5).total == 5
    assert train(9).total == 9


@pytest.mark.parametrize("due", [{"save_steps": 13}, {"save_strategy": "epoch"}], ids=["at the step", "at the epoch"])
def test_a_loop_left_at_an_epochs_last_step_has_its_checkpoint(tmp_path: Path, due: dict[str, object]) -> None:
    """The checkpoint is taken at the epoch's end, which comes when the next batch is asked for; here it never is."""
    settings = {"max_steps": 20, "eval_steps": 0, **due}
    unbroken, broken = OwnLoop(tmp_path / "a", **settings), OwnLoop(tmp_path / "b", **settings)
    unbroken.train()
    with broken.run() as run:
        for batch in run.batches():
            run.step_end(loss=broken.update(batch))
            if run.state.global_step == 13:
                break
    assert run.result is not None
    assert run.result.checkpoint == tmp_path / "b/checkpoints/step-00000013"
    again = OwnLoop(tmp_path / "b", **settings)
    with again.run() as run:
        for batch in run.batches():
            run.step_end(loss=again.update(batch))
    assert run.resumed_from == tmp_path / "b/checkpoints/step-00000013"
    for one, other in zip(unbroken.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    logs = [[timeless(record) for record in read_records(tmp_path / run / "logs/train.jsonl")] for run in "ab"]
    assert logs[0] == logs[1]


def test_a_loop_left_in_the_middle_saves_nothing(tmp_path: Path) -> None:
    """Behind an epoch's last step: the batch that is asked for next belongs to the epoch after it."""
    loop = OwnLoop(tmp_path, eval_steps=0, save_steps=14)
    with loop.run() as run:
        for batch in run.batches():
            if run.state.global_step == 13:
                break
            run.step_end(loss=loop.update(batch))
    assert run.result is not None
    assert run.result.checkpoint is None
