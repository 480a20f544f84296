"""Rollbacks: to which checkpoint a run goes back, what it skips, and that a kill at any point of it changes nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import CheckLoss, DivergenceDetector, JsonLogger, NaNChecker
from dalsegno.checkpoint.async_save import AsyncSave
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.logs import RunFile, read_records
from dalsegno.system import filesystem
from dalsegno.system.exit_status import ExitStatus
from dalsegno.testing import FaultPlan, assert_resume_equivalent, start_ranks, tiny_regression_data
from dalsegno.training.rollback import RollbackFile
from support.ranked import Numbered
from support.rolling import (
    LENGTH,
    Dropping,
    Sniffer,
    at_an_epochs_end,
    own_loader,
    rolling,
    samples_of_step,
    sharded,
    twice_bad,
)
from support.small import small_trainer


def samples_of_steps(*steps: int) -> list[list[int]]:
    return [samples_of_step(step) for step in steps]


def test_a_run_goes_back_and_skips_the_data_up_to_the_step_that_asked(tmp_path: Path) -> None:
    sniffer = Sniffer(samples_of_step(10))
    result = rolling(tmp_path, sniffer, JsonLogger()).train()
    assert (result.reason, result.global_step) == ("finished", 14)
    assert sniffer.rollbacks == [(10, 4)]
    assert sniffer.steps == [*range(1, 11), *range(5, 15)]
    assert sniffer.seen == samples_of_steps(*range(1, 11), *range(11, 21))
    (recovery,) = RollbackFile(tmp_path).read()
    assert (recovery.at_step, recovery.to_step, recovery.by) == (10, 4, "Sniffer")
    assert (recovery.since, recovery.until) == ((0, 8), (0, 20))
    assert [path.name for path in (tmp_path / "rewound/timeline.0001/checkpoints").iterdir()] == ["step-00000008"]
    steps = [record["global_step"] for record in read_records(tmp_path / "logs/train.jsonl") if "loss" in record]
    assert steps == [*range(1, 15)]
    lost = [record["global_step"] for record in read_records(tmp_path / "logs/rewound/train.jsonl.0001")]
    assert lost == [*range(5, 11)]
    record = RunFile(tmp_path).load()
    assert record is not None
    assert [(each["from_step"], each["to_step"]) for each in record.legs[0].rollbacks] == [(10, 4)]


@pytest.mark.parametrize(
    ("how", "to_step", "then"),
    [
        ({"steps": 1}, 8, 11),
        ({"to": 7}, 4, 11),
        ({"skip": 2}, 4, 13),
        ({"to": 0, "skip": 3}, 0, 14),
    ],
)
def test_a_request_may_choose_the_checkpoint_and_the_data(
    tmp_path: Path, how: dict[str, Any], to_step: int, then: int
) -> None:
    sniffer = Sniffer(samples_of_step(10), **how)
    rolling(tmp_path, sniffer, max_steps=11).train()
    assert sniffer.rollbacks == [(10, to_step)]
    assert sniffer.seen[10] == samples_of_step(then)


def test_without_skipping_the_same_data_leads_there_again_until_the_budget_is_used_up(tmp_path: Path) -> None:
    sniffer = Sniffer(samples_of_step(10))
    policy = "RecoveryPolicy(margin=3, skip=None, budget=2)"
    result = rolling(tmp_path, sniffer, policy=policy).train()
    assert sniffer.rollbacks == [(10, 4), (10, 0)]  # the second time, from the same place, it goes back further
    assert (result.reason, result.diverged, result.global_step) == ("stopped", True, 10)
    assert result.exit_status is ExitStatus.DIVERGED
    assert result.why == "a bad sample; the budget of 2 rollbacks is used up"
    assert result.checkpoint == tmp_path / "checkpoints/step-00000010"


def test_a_budget_within_a_window_and_an_abort(tmp_path: Path) -> None:
    sniffer = Sniffer([*samples_of_step(6), *samples_of_step(12), *samples_of_step(14)])
    policy = "RecoveryPolicy(margin=1, budget=1, window=3, when_used_up='abort')"
    result = rolling(tmp_path, sniffer, policy=policy).train()
    assert sniffer.rollbacks == [(6, 4), (10, 8)]  # four steps apart
    assert (result.reason, result.diverged, result.global_step) == ("aborted", True, 10)
    assert result.checkpoint == tmp_path / "checkpoints/step-00000008"


def test_a_budget_in_the_run_beside_the_one_within_a_window(tmp_path: Path) -> None:
    sniffer = Sniffer([*samples_of_step(6), *samples_of_step(12), *samples_of_step(17)])
    policy = "RecoveryPolicy(margin=1, budget=1, window=3, run_budget=2)"
    result = rolling(tmp_path, sniffer, policy=policy).train()
    assert sniffer.rollbacks == [(6, 4), (10, 8)]
    assert (result.reason, result.global_step) == ("stopped", 13)
    assert result.why == "a bad sample; the budget of 2 rollbacks in the run is used up"
    with pytest.raises(ConfigurationError, match="without window="):
        ds.RecoveryPolicy(run_budget=2)


def test_before_the_first_regular_checkpoint_a_run_goes_back_to_its_beginning(tmp_path: Path) -> None:
    sniffer = Sniffer(samples_of_step(3))
    rolling(tmp_path / "back", sniffer, JsonLogger(), lr_scheduler_type="constant").train()
    assert sniffer.rollbacks == [(3, 0)]
    assert sniffer.seen[3:5] == samples_of_steps(4, 5)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    class Damage(ds.Callback):
        def on_step_begin(self, ctx: Any) -> None:
            path = tmp_path / "checkpoints/step-00000004/model/shard-00000.safetensors"
            if ctx.state.global_step == 9 and path.exists():
                path.write_bytes(path.read_bytes()[:-1] + b"x")

    sniffer = Sniffer(samples_of_step(10))
    rolling(tmp_path, Damage(), sniffer).train()
    assert sniffer.rollbacks == [(10, 0)]


def test_a_save_in_progress_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint to which the run goes back is not published before the decision waits for it."""
    published, wait, is_awaited = tmp_path / "checkpoints/step-00000008", AsyncSave.wait, threading.Event()

    def hold(operation: str, path: Path) -> None:
        if operation == "write" and path.parent.name == "step-00000008.partial" and path.name == "manifest.json":
            assert is_awaited.wait(60)

    def waited(save: AsyncSave) -> None:
        if save.step == 8:
            assert not published.exists()
            is_awaited.set()
        wait(save)

    monkeypatch.setattr(filesystem, "watcher", hold)
    monkeypatch.setattr(AsyncSave, "wait", waited)
    sniffer = Sniffer(samples_of_step(9), steps=1)
    rolling(tmp_path, sniffer).train()
    assert sniffer.rollbacks == [(9, 8)]


def test_old_checkpoints_are_kept_as_long_as_a_rollback_may_need_them(tmp_path: Path) -> None:
    sniffer = Sniffer(samples_of_step(10))
    rolling(tmp_path, sniffer, save_total_limit=1).train()
    assert sniffer.rollbacks == [(10, 4)]


def test_a_request_from_an_evaluation_acts_at_its_end(tmp_path: Path) -> None:
    class Judge(ds.Callback):
        asked = False

        def on_evaluate(self, ctx: Any) -> None:
            if not self.asked and ctx.state.global_step == 6:
                self.asked = True
                ctx.control.roll_back("the evaluation is bad")

    sniffer = Sniffer([])
    rolling(tmp_path, Judge(), sniffer, eval_steps=6, parts={"eval_dataset": Numbered(4)}).train()
    assert sniffer.rollbacks == [(6, 0)]
    assert sniffer.steps == [*range(1, 7), *range(1, 15)]


def test_the_learning_rate_is_lower_for_a_while_and_the_schedule_stays(tmp_path: Path) -> None:
    policy = "RecoveryPolicy(margin=3, lr_factor=0.5, lr_steps=3)"
    sniffer = Sniffer(samples_of_step(10))
    rolling(tmp_path, sniffer, JsonLogger(), policy=policy, learning_rate=0.14).train()
    rates = {
        record["global_step"]: record["learning_rate"]
        for record in read_records(tmp_path / "logs/train.jsonl")
        if "learning_rate" in record
    }
    expected = {step: (15 - step) * 0.01 * (0.5 if 5 <= step <= 7 else 1) for step in range(1, 15)}
    assert rates == pytest.approx(expected)


def test_a_stop_that_is_requested_with_a_rollback_ends_the_leg_at_the_checkpoint(tmp_path: Path) -> None:
    class Stop(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if ctx.step == 10:
                ctx.control.stop("enough for today")

    result = rolling(tmp_path, Sniffer(samples_of_step(10)), Stop()).train()
    assert (result.reason, result.global_step, result.why) == ("stopped", 4, "enough for today")
    sniffer = Sniffer([])
    assert rolling(tmp_path, sniffer).train().reason == "finished"
    assert sniffer.seen == samples_of_steps(*range(11, 21))


def test_a_command_waits_during_a_rollback_and_an_earlier_one_acts_again(tmp_path: Path) -> None:
    class Client(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if ctx.step == 6 and not sniffer.rollbacks:
                ctx.trainer.commands.submit("set", {"logging_steps": 7}, by="me")

        def on_step_done(self, ctx: Any) -> None:
            if ctx.step == 10:
                ctx.trainer.commands.submit("save_and_stop", by="me")

    sniffer = Sniffer(samples_of_step(10))
    trainer = rolling(tmp_path, Client(), sniffer, JsonLogger())
    result = trainer.train()
    assert sniffer.rollbacks == [(10, 4)]
    assert (result.reason, result.stopped_by, result.global_step) == ("stopped", "me", 5)
    assert rolling(tmp_path, sniffer, JsonLogger()).train().reason == "finished"
    steps = [record["global_step"] for record in read_records(tmp_path / "logs/train.jsonl") if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 7, 14]  # step 6 has set it before its record


def test_nan_goes_back_by_each_callback_that_finds_it(tmp_path: Path) -> None:
    data = [dict(tiny_regression_data(LENGTH)[index]) for index in range(LENGTH)]
    data[samples_of_step(6)[0]]["x"] = torch.full((8,), float("nan"))
    finders: list[Any] = [
        CheckLoss(action="rollback"),
        NaNChecker(action="rollback"),
        DivergenceDetector(action="rollback"),
    ]
    for finder in finders:
        place = tmp_path / type(finder).__name__
        settings = {"max_steps": 8, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
        policy = ds.RecoveryPolicy(margin=1)
        result = small_trainer(place, finder, parts={"train_dataset": data}, recovery=policy, **settings).train()
        (recovery,) = RollbackFile(place).read()
        assert (recovery.at_step, recovery.to_step, result.reason) == (6, 4, "finished")


def test_a_loop_of_the_users_own_goes_back_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Numbered(LENGTH), batch_size=2)
    sniffer = Sniffer([19])
    rates = []
    args = ds.TrainingArguments(
        tmp_path,
        max_steps=12,
        save_steps=4,
        eval_steps=0,
        recovery=ds.RecoveryPolicy(margin=3, lr_factor=0.5),
        use_cpu=True,
    )
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=[sniffer]) as run:
        for batch in run.batches():
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(run._lr)
            run.step_end(loss=0.0)
    assert sniffer.rollbacks == [(10, 4)]
    assert [numbers[0] for numbers in sniffer.seen] == [*range(0, 20, 2), *range(20, 36, 2)]
    assert rates == [0.1] * 10 + [0.05] * 8
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"DivergenceDetector\(action='rollback'\) needs TrainingArg"):
        small_trainer(tmp_path, DivergenceDetector(action="rollback"), save_steps=2)
    with pytest.raises(ConfigurationError, match=r"roll_back.*no policy"):
        small_trainer(tmp_path).control.roll_back("why")
    trainer = rolling(tmp_path)
    with pytest.raises(ConfigurationError, match="give only one"):
        trainer.control.roll_back("why", steps=1, to=2)
    with pytest.raises(ConfigurationError, match=r"roll_back\(skip=-1\)"):
        trainer.control.roll_back("why", skip=-1)
    with pytest.raises(ConfigurationError, match="needs checkpoints"):
        rolling(tmp_path, save_steps=0)
    with pytest.raises(ConfigurationError, match="newest checkpoint only"):
        rolling("s3://bucket/run", local_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="lr_factor=2"):
        ds.RecoveryPolicy(lr_factor=2)
    with pytest.raises(ConfigurationError, match="leave lr_factor out"):
        rolling(tmp_path, policy="RecoveryPolicy(lr_factor=0.5)", fuse_optim_with_backward=True, max_grad_norm=0)


def test_a_rollback_is_recorded_although_the_list_of_legs_is_damaged(tmp_path: Path) -> None:
    class Damage(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if ctx.step == 10:
                (tmp_path / "run.json").write_bytes(b"{")

    rolling(tmp_path, Damage(), Sniffer(samples_of_step(10)), save_in_background=False).train()
    run = RunFile(tmp_path).load()
    assert run is not None
    assert [(each["from_step"], each["to_step"]) for each in run.legs[-1].rollbacks] == [(10, 4)]


def test_a_request_after_the_last_step_is_refused_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(ds.Callback):
        def on_log(self, ctx: Any) -> None:
            if ctx.kind == "final":
                ctx.control.roll_back("the end is bad")

    result = rolling(tmp_path, Late()).train()
    assert (result.reason, result.global_step) == ("finished", 14)
    assert "Late requests to go back (the end is bad) after the last step: the run stays" in caplog.text
    assert not RollbackFile(tmp_path).read()


def test_starting_anew_forgets_the_rollbacks(tmp_path: Path) -> None:
    rolling(tmp_path, Sniffer(samples_of_step(10)), max_steps=11).train()
    sniffer = Sniffer([])
    rolling(tmp_path, sniffer, max_steps=11).train(resume_from_checkpoint=False)
    assert sniffer.seen == samples_of_steps(*range(1, 12))
    assert not (tmp_path / "recoveries.jsonl").exists()
    assert list(tmp_path.glob("rewound/*/recoveries.jsonl"))


def test_a_resume_from_before_a_rollback_skips_the_same_data(tmp_path: Path) -> None:
    rolling(tmp_path, Sniffer(samples_of_step(10)), policy="RecoveryPolicy(margin=2)", max_steps=10).train()
    sniffer = Sniffer([])
    rolling(tmp_path, sniffer, max_steps=10).train(resume_from_checkpoint=tmp_path / "checkpoints/step-00000004")
    assert sniffer.seen == samples_of_steps(5, 6, 7, 8, 11, 12)


def test_a_damaged_record_of_rollbacks_is_refused(tmp_path: Path) -> None:
    rolling(tmp_path, Sniffer(samples_of_step(10)), max_steps=11).train()
    path = tmp_path / "recoveries.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps(json.loads(first) | {"until": "soon"}) + f"\n{second}\n")
    with pytest.raises(ds.errors.StateMismatch, match=r"recoveries.jsonl: line 1 is damaged"):
        rolling(tmp_path, max_steps=12).train()


def test_killed_during_rollbacks_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    kills = [
        FaultPlan(operation="any", path="recoveries.jsonl", count=1),
        FaultPlan(operation="any", path="rewound", count=1),
        FaultPlan(event=Event.ROLLBACK),
        FaultPlan(event=Event.STEP_BEGIN, count=3),
    ]
    assert_resume_equivalent(twice_bad, kills, folder=tmp_path)


def test_a_rollback_that_a_later_leg_completes_is_in_the_history(tmp_path: Path) -> None:
    """Killed between the decision and the first operation after it."""
    (outcome,) = start_ranks(train_until_decided, 1, tmp_path).wait()
    assert outcome.was_killed
    twice_bad(tmp_path).train()
    log = ds.open_log(tmp_path)
    first, second = log.lineage()
    steps = [[(each["from_step"], each["to_step"]) for each in leg.leg.rollbacks] for leg in (first, second)]
    assert steps == [[(10, 4)], [(6, 0)]]
    assert (first.reason, first.redone, second.leg.first_step) == ("died", 0, 4)
    assert second.leg.resumed is None, "other steps than before are wanted"
    (summary,) = [log.summary()]
    assert (summary.rollbacks, summary.redone_steps) == (2, 12)
    assert [(each.step, each.reached, each.leg) for each in log.restarts()] == [(4, 10, None), (4, 4, 2), (0, 6, None)]


def train_until_decided(output_dir: Path) -> None:
    FaultPlan(operation="mkdir", path="rewound").arm()
    twice_bad(output_dir).train()


@pytest.mark.parametrize("factory", [at_an_epochs_end, own_loader])
def test_epochs_ends_and_other_loaders(tmp_path: Path, factory: Any) -> None:
    kills = [FaultPlan(operation="any", path="recoveries.jsonl", count=3), FaultPlan(event=Event.STEP_BEGIN, count=2)]
    assert_resume_equivalent(factory, kills, folder=tmp_path)
    assert RollbackFile(tmp_path / "reference").read()


@pytest.mark.parametrize("factory", [twice_bad, sharded])
def test_two_ranks(tmp_path: Path, factory: Any) -> None:
    """Only one rank sees the sample."""
    kills = [FaultPlan(operation="any", path="recoveries.jsonl", count=3), FaultPlan(event=Event.STEP_BEGIN, count=3)]
    assert_resume_equivalent(factory, kills, world_size=2, folder=tmp_path)
