"""Commands to a running job: they act on all ranks at one step, and a resumed run repeats them there."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dalsegno as ds
from dalsegno.callbacks import EMA, CountParams, FlopUtilization, HangWatchdog, JsonLogger, ScaleLoss
from dalsegno.control import Answer, Inbox, Outcome, send
from dalsegno.logs import read_records
from dalsegno.system import filesystem
from dalsegno.testing import (
    FaultPlan,
    assert_resume_equivalent,
    check_resume,
    compare_runs,
    run_ranks,
    tiny_regression_data,
)
from support.commanded import (
    ALL,
    Client,
    Losses,
    TinyWithDropout,
    acted,
    commanded,
    lines,
    losses_of_records,
    set_at_five,
    set_at_seven,
    with_all,
    with_all_sharded,
)
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer

KILLS = [
    FaultPlan(event=ds.Event.STEP_DONE, count=3),  # before the first checkpoint, after effects
    FaultPlan(event=ds.Event.STEP_DONE, count=7),
    FaultPlan(event=ds.Event.STEP_DONE, count=7),
]


def test_every_command_is_repeated_where_it_acted(tmp_path: Path) -> None:
    """Alone: weights, optimizer, records and evaluations are those of the run that was never killed."""
    assert_resume_equivalent(with_all, KILLS, folder=tmp_path)
    assert acted(tmp_path / "reference") == [(name, step) for step, given in ALL.items() for name, _ in given]
    assert acted(tmp_path / "killed") == acted(tmp_path / "reference")


@pytest.mark.parametrize("factory", [with_all, with_all_sharded])
def test_on_two_ranks(tmp_path: Path, factory: Any) -> None:
    """DDP and FSDP2."""
    assert_resume_equivalent(factory, KILLS[1:], world_size=2, folder=tmp_path)
    assert acted(tmp_path / "killed") == [(name, step) for step, given in ALL.items() for name, _ in given]


def test_a_record_that_a_command_calls_off_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Though the ranks have exchanged their sums for it."""
    commands = {2: [("set", {"logging_steps": 4})], 3: [("log", {})]}
    called_off, _ = run_ranks(losses_of_records, 2, tmp_path / "called off", commands, 2)
    as_planned, _ = run_ranks(losses_of_records, 2, tmp_path / "as planned", {}, 3)
    assert called_off.keys() == {3, 4}
    assert called_off[3] == as_planned[3]


def test_killed_between_acknowledgement_and_effect(tmp_path: Path) -> None:
    """The next leg resumes from step 4, and carries it out after its first step."""
    check_resume(set_at_five, [FaultPlan(event=ds.Event.STEP_DONE, count=9)], folder=tmp_path / "five")
    kill = FaultPlan(operation="write", path="control.jsonl", count=3)  # after two acknowledgements
    check_resume(set_at_seven, [kill], folder=tmp_path / "seven")
    assert acted(tmp_path / "seven" / "killed") == [("set", 5), ("evaluate", 5)]
    comparison = compare_runs(tmp_path / "five" / "reference", tmp_path / "seven" / "killed")
    assert comparison.identical, comparison.table()


def test_killed_between_record_and_effect(tmp_path: Path) -> None:
    """What is on disk as taking effect does so, at that step."""
    kill = FaultPlan(operation="fsync", path="control.jsonl", count=3)
    assert_resume_equivalent(set_at_seven, [kill], folder=tmp_path)
    assert acted(tmp_path / "killed") == [("set", 7), ("evaluate", 7)]


# --- on one step ------------------------------------------------------------------------------------------------------


def tickets(trainer: ds.Trainer) -> list[Outcome | None]:
    (client,) = [each for each in trainer.callbacks if isinstance(each, Client)]
    return [ticket.wait(0) for ticket in client.tickets]


def test_the_answer_is_the_step(tmp_path: Path) -> None:
    trainer = commanded(tmp_path, {3: [("log", {}), ("save_checkpoint", {})], 5: [("evaluate", {})]}, save_steps=0)
    trainer.train()
    assert tickets(trainer) == [Outcome(3), Outcome(3), Outcome(5)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    evaluated = [record for record in read_records(tmp_path / "logs" / "train.jsonl") if record.get("kind") == "eval"]
    assert [record["global_step"] for record in evaluated] == [5]


def test_a_checkpoint_may_be_evaluated_before(tmp_path: Path) -> None:
    trainer = commanded(tmp_path, {3: [("save_checkpoint", {"evaluate": True})]}, save_steps=0)
    trainer.train()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    saved = json.loads((checkpoint / "manifest.json").read_text())["metrics"]
    (evaluated,) = (each for each in read_records(tmp_path / "logs" / "train.jsonl") if each.get("kind") == "eval")
    assert (evaluated["global_step"], evaluated["eval_loss"]) == (3, saved["eval_loss"])


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({"save_steps": 0}, {5}),
        ({"save_steps": 2}, {2, 4, 5, 6, 8, 10}),
        ({"save": "AtSteps(2, 4)", "save_steps": 500, "eval_steps": 2}, {2, 4, 5, 10}),
        ({"save_strategy": "epoch", "load_best_model_at_end": True}, {5, 10}),
    ],
)
def test_each_checkpoint_may_be_evaluated_before(tmp_path: Path, settings: dict[str, Any], saved: set[int]) -> None:
    """Once, whoever asks for the checkpoint; but not where a leg is interrupted."""
    given = {"num_train_epochs": 2, "eval_steps": 0, "eval_on_save": True, **settings}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}

    asks = Listener({"on_step_end": lambda ctx: setattr(ctx.control, "should_save", ctx.step == 5)}, name="asks")
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("enough") if ctx.step == 7 else None}, name="stop")
    for leg in ([stop], []):
        small_trainer(tmp_path, JsonLogger(), asks, *leg, parts=parts, **given).train()
    manifests = [json.loads(each.read_text()) for each in tmp_path.glob("checkpoints/*/manifest.json")]
    metrics = {each["step"]: each["metrics"] for each in manifests}
    records = [each for each in read_records(tmp_path / "logs" / "train.jsonl") if each.get("kind") == "eval"]
    evaluated = {each["global_step"]: each["eval_loss"] for each in records}
    assert len(evaluated) == len(records), "each once"
    assert evaluated.keys() == saved | ({2, 4, 6, 8, 10} if "eval_steps" in settings else set())
    assert metrics.pop(7) == {}
    assert {step: each["eval_loss"] for step, each in metrics.items()} == {step: evaluated[step] for step in saved}


def saved_by_rank_one(output_dir: Path) -> dict[str, float]:
    asks = Listener({"on_step_end": lambda ctx: setattr(ctx.control, "should_save", dist.get_rank() == 1)})
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    small_trainer(output_dir, asks, parts=parts, max_steps=1, eval_on_save=True).train()
    (manifest,) = output_dir.glob("checkpoints/*/manifest.json")
    return dict(json.loads(manifest.read_text())["metrics"])


def test_it_is_evaluated_whichever_rank_asks_for_it(tmp_path: Path) -> None:
    first, second = run_ranks(saved_by_rank_one, 2, tmp_path)
    assert first == second and "eval_loss" in first


@pytest.mark.parametrize(
    ("command", "reason", "saved"),
    [("graceful_stop", "stopped", 6), ("save_and_stop", "stopped", 6), ("abort", "aborted", 4)],
)
def test_a_stop_names_who_sent_it_and_the_next_leg_resumes(
    tmp_path: Path, command: str, reason: str, saved: int
) -> None:
    trainer = commanded(tmp_path, {6: [(command, {})]})
    result = trainer.train()
    assert (result.reason, result.stopped_by, result.why) == (reason, "client at 6", f"command {command}")
    assert tickets(trainer) == [Outcome(6)]
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{saved:08}"
    later = commanded(tmp_path, {}).train()
    assert (later.reason, later.global_step) == ("finished", 12)


def test_settings_act_before_the_rest_of_their_step(tmp_path: Path) -> None:
    """The record, evaluation and checkpoint of this very step are due by the new ones."""
    change = {"logging_steps": 5, "eval_steps": 5, "save_steps": 5}
    trainer = commanded(tmp_path, {4: [("set", {"save_steps": 5, "logging_steps": 5})], 5: [("set", change)]})
    trainer.train()
    steps = [record["global_step"] for record in read_records(tmp_path / "logs" / "train.jsonl") if "loss" in record]
    assert steps == [2, 5, 10]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-00000005", "step-00000010", "step-00000012"]
    assert trainer.args.save_steps == 4  # the script's own


def test_two_commands_at_once_act_in_their_order(tmp_path: Path) -> None:
    trainer = commanded(tmp_path, {3: [("set", {"save_steps": 6}), ("set", {"save_steps": 5})]}, logging_steps=0)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[0] == "step-00000005"


def test_the_second_of_two_is_checked_against_the_first(tmp_path: Path) -> None:
    """Alone each could be carried out; what is accepted may no longer be so when it would act."""
    commands = {3: [("set", {"save_steps": 0}), ("set", {"eval_steps": 0})]}
    with pytest.raises(ds.ConfigurationError, match="load_best_model_at_end=True needs"):
        commanded(tmp_path, commands, eval_steps=4, load_best_model_at_end=True).train()


# --- over later legs --------------------------------------------------------------------------------------------------


def stopped_after(output_dir: Path, steps: int, commands: Any, *callbacks: Any) -> None:
    stop = {steps: [*commands.get(steps, ()), ("graceful_stop", {})]}
    commanded(output_dir, {**commands, **stop}, *callbacks).train()


def test_settings_stay_in_force_until_the_script_changes_them(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    stopped_after(tmp_path, 4, {3: [("set", {"save_steps": 5, "logging_steps": 3})]})
    second = commanded(tmp_path, {6: [("graceful_stop", {})]})
    reports: list[Any] = []
    second.add_callback(Listener({"on_load": lambda ctx: reports.append(ctx.report.changes)}))
    second.train()
    assert reports == [[]]
    assert "save_steps=5 is in force, by a command (the script: 4)" in caplog.text
    third = commanded(tmp_path, {}, save_steps=7)
    seen: list[tuple[int, int]] = []
    third.add_callback(
        Listener({"on_train_begin": lambda ctx: seen.append((ctx.args.save_steps, ctx.args.logging_steps))})
    )
    third.train()
    assert seen == [(7, 3)]
    assert "save_steps: the script's new value takes effect" in caplog.text
    assert [line["settings"] for line in lines(tmp_path, "overridden")] == [["save_steps"]]
    fourth = commanded(tmp_path, {}, max_steps=14)  # back to the script's first value: it stays the script's
    fourth.add_callback(Listener({"on_train_begin": lambda ctx: seen.append((ctx.args.save_steps, 0))}, name="more"))
    fourth.train()
    assert seen[-1] == (4, 0)


def test_a_second_train_in_the_same_process_keeps_them(tmp_path: Path) -> None:
    trainer = commanded(tmp_path, {3: [("set", {"max_steps": 6, "save_steps": 2})]})
    assert trainer.train().global_step == 6
    assert (trainer.args.max_steps, trainer.args.save_steps) == (12, 4)
    assert trainer.train().global_step == 6  # finished
    trainer.args.max_steps = 9
    assert trainer.train().global_step == 9
    assert (tmp_path / "checkpoints" / "step-00000008").exists()


def test_what_waits_at_the_end_of_a_leg_acts_in_the_next(tmp_path: Path) -> None:
    """A command to a job that is just ending: it is refused, or kept, and the answer says which."""
    answers: list[Any] = []

    def late(ctx: Any) -> None:
        with pytest.raises(ds.NotRunning, match="ends after step 6"):
            ctx.trainer.commands.submit("log", by="late")
        answers.extend(ticket.wait(0) for ticket in tardy)

    def in_the_last_boundary(ctx: Any) -> None:
        if ctx.state.global_step == 6 and ctx.kind == "train":
            tardy.append(ctx.trainer.commands.submit("set", {"save_steps": 5}, by="tardy"))
            tardy.append(ctx.trainer.commands.submit("save_checkpoint", by="tardy"))

    tardy: list[Any] = []
    first = commanded(tmp_path, {6: [("graceful_stop", {})]})
    first.add_callback(Listener({"on_log": in_the_last_boundary, "on_train_end": late}))
    first.train()
    assert [answer.step for answer in answers] == [None, None]
    assert "the next leg carries it out" in answers[0].error
    assert answers[1].error == "the leg ended after step 6 first"
    commanded(tmp_path, {}).train()
    assert acted(tmp_path) == [("graceful_stop", 6), ("set", 7)]


def test_going_back_abandons_later_commands(tmp_path: Path) -> None:
    """As it does later checkpoints: a setting that went wrong is not repeated."""
    stopped_after(tmp_path, 9, {3: [("set", {"logging_steps": 3})], 6: [("set", {"save_steps": 1})]})
    seen: list[tuple[int, int]] = []
    note = Listener({"on_train_begin": lambda ctx: seen.append((ctx.args.logging_steps, ctx.args.save_steps))})
    back = commanded(tmp_path, {}, note)
    back.train(resume_from_checkpoint=tmp_path / "checkpoints" / "step-00000004")
    assert seen == [(3, 4)]
    assert [line["step"] for line in lines(tmp_path, "rewound")] == [4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[1:] == ["step-00000008", "step-00000012"]


def test_a_resume_that_is_refused_changes_no_line(tmp_path: Path) -> None:
    stopped_after(tmp_path, 9, {6: [("set", {"save_steps": 1})]})
    before = (tmp_path / "control.jsonl").read_bytes()
    other = commanded(tmp_path, {}, model=Line())
    with pytest.raises(ds.StateMismatch):
        other.train(resume_from_checkpoint=tmp_path / "checkpoints" / "step-00000004")
    assert (tmp_path / "control.jsonl").read_bytes() == before
    assert other.args.save_steps == 4


def test_a_new_start_archives_the_commands_too(tmp_path: Path) -> None:
    stopped_after(tmp_path, 5, {3: [("set", {"max_steps": 6})]})
    assert commanded(tmp_path, {}).train(resume_from_checkpoint=False).global_step == 12
    assert (tmp_path / "rewound" / "timeline.0001" / "control.jsonl").exists()
    assert not (tmp_path / "control.jsonl").exists()


def killed_after(output_dir: Path, steps: int, commands: Any) -> None:
    """As SIGKILL: the leg writes nothing more. Its newest checkpoint is that of the last multiple of 4."""

    def die(ctx: Any) -> None:
        if ctx.step == steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commanded(output_dir, commands, Listener({"on_step_done": die})).train()


def test_a_newer_command_is_not_undone_by_an_older_one_that_is_repeated(tmp_path: Path) -> None:
    """Whoever corrects a setting in the leg that repeats it has the last word, in later legs too."""
    killed_after(tmp_path, 11, {10: [("set", {"eval_steps": 1, "logging_steps": 1})]})
    killed_after(tmp_path, 9, {9: [("set", {"eval_steps": 6})]})
    seen: list[tuple[int, int]] = []
    note = Listener({"on_train_end": lambda ctx: seen.append((ctx.args.logging_steps, ctx.args.eval_steps))})
    commanded(tmp_path, {}, note).train()
    assert seen == [(1, 6)]
    assert [line["settings"] for line in lines(tmp_path, "overridden")] == [["eval_steps"]]


def test_what_cannot_be_repeated_is_said_before_the_first_step(tmp_path: Path, caplog: Any) -> None:
    killed_after(tmp_path, 7, {6: [("evaluate", {}), ("switch", {"callback": "JsonLogger", "on": False})]})
    without = small_trainer(tmp_path, Client({}), model=TinyWithDropout(), length=200, max_steps=12, save_steps=4)
    without.train()
    assert "step 6: evaluate, by client at 6, does not take effect again: evaluate: this run has no eval" in caplog.text
    assert "switch callback=JsonLogger, on=False, by client at 6, does not take effect again: unknown" in caplog.text


def test_a_hostile_journal_does_nothing(tmp_path: Path, caplog: Any) -> None:
    """What is read back goes through the same check as what is submitted."""
    stopped_after(tmp_path, 5, {})
    entry = {"kind": "accepted", "time": 1.0, "by": "x"}
    act = {"kind": "acted", "time": 1.0, "script": {}}
    with (tmp_path / "control.jsonl").open("a") as file:
        for number, (command, data) in enumerate(
            [
                ("__reduce__", {"x": "os.system"}),
                ("set", {"output_dir": "/", "save_steps": 1}),
                ("set", {"max_steps": 10**400}),
                ("set", {"learning_rate": {"factor": {"factor": 1}}}),
                ("switch", {"callback": 5, "on": "no"}),
                ("switch", {}),
                ("set", {}),
            ]
        ):
            for step in (3, 9):
                id_ = f"{number} {step}"
                file.write(json.dumps({**entry, "id": id_, "command": command, "data": data}) + "\n")
                file.write(json.dumps({**act, "id": id_, "step": step}) + "\n")
    later = commanded(tmp_path, {})
    assert later.train().global_step == 12
    assert later.args.save_steps == 4
    assert "unknown field of set 'output_dir'" in caplog.text


# --- observers --------------------------------------------------------------------------------------------------------


def test_an_observer_is_switched_off_and_on(tmp_path: Path) -> None:
    """From the step after the command's; its state is saved meanwhile; and so in later legs."""
    off, on = ({"callback": "Losses", "on": value} for value in (False, True))
    stopped_after(tmp_path, 6, {3: [("switch", off)]}, first := Losses())
    assert first.steps == [1, 2, 3]
    commanded(tmp_path, {9: [("switch", on)]}, second := Losses()).train()
    assert second.steps == [1, 2, 3, 10, 11, 12]


@pytest.mark.parametrize(
    ("key", "callback", "reason"),
    [
        ("Losess", None, "did you mean 'Losses'"),
        ("Client", None, "it may set flags of the control"),
        ("EMA", EMA(0.9), "takes part in the training"),
        ("ScaleLoss", ScaleLoss(2.0), "takes part in the training"),
        ("HangWatchdog", HangWatchdog(), "has to act at once"),
        ("CountParams", CountParams(), "does nothing between"),
        ("model flops", FlopUtilization(), "others use what it measures"),
    ],
)
def test_what_is_not_an_observer_stays_on(tmp_path: Path, key: str, callback: Any, reason: str) -> None:
    more = [] if callback is None else [callback]
    trainer = commanded(tmp_path, {2: [("switch", {"callback": key, "on": False})]}, Losses(), *more)
    with pytest.raises(ds.ConfigurationError, match=reason):
        trainer.train()


@pytest.mark.parametrize(
    "command", [("evaluate", {}), ("set", {"eval_steps": 2}), ("save_checkpoint", {"evaluate": True})]
)
def test_without_an_evaluation_set_there_is_nothing_to_evaluate(tmp_path: Path, command: Any) -> None:
    trainer = commanded(tmp_path, {2: [command]}, parts={})
    with pytest.raises(ds.ConfigurationError, match="no evaluation set"):
        trainer.train()


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_on_a_full_disk_a_change_waits(tmp_path: Path, caplog: Any) -> None:
    """Nothing takes effect that a resumed run would not know of."""

    def fill(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            filesystem.watcher = refuse
        elif ctx.state.global_step == 5:
            filesystem.watcher = None

    def refuse(operation: str, path: Path) -> None:
        if path.name == "control.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")

    trainer = commanded(tmp_path, {3: [("set", {"save_steps": 5})]}, Listener({"on_step_end": fill}))
    try:
        trainer.train()
    finally:
        filesystem.watcher = None
    assert acted(tmp_path) == [("set", 5)]
    assert tickets(trainer) == [Outcome(5)]
    assert "commands wait until it can" in caplog.text


# --- through files ----------------------------------------------------------------------------------------------------


def test_commands_reach_a_training_job_as_files(tmp_path: Path) -> None:
    """A client of another process, in effect: it knows nothing but the folder."""
    answers: list[Answer] = []

    def begin(ctx: Any) -> None:
        inbox.append(Inbox(ctx.args.directory, ctx.trainer.commands))
        inbox[0].start()
        client.start()

    def commands() -> None:
        answers.append(send(tmp_path, "set", {"save_steps": 7}, by="client", for_effect=True, timeout=60))
        answers.append(send(tmp_path, "graceful_stop", by="client", for_effect=True, timeout=60))

    inbox: list[Inbox] = []
    client = threading.Thread(target=commands)
    end = Listener({"on_train_begin": begin, "on_train_end": lambda ctx: inbox[0].close()})
    result = commanded(tmp_path, {}, end, max_steps=10**6, length=10**6, save_steps=0, logging_steps=0).train()
    client.join()
    assert (result.reason, result.stopped_by) == ("stopped", "client")
    assert [answer.error for answer in answers] == [None, None]
    assert answers[1].step == result.global_step
    assert acted(tmp_path) == [("set", answers[0].step), ("graceful_stop", answers[1].step)]
    assert list((tmp_path / "control").rglob("*.json")) == []
