"""Killed at random instants and resumed: as if it had never been killed, bit by bit.

Each test is one run that is killed again and again, and one that is not; every leg is a process of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dalsegno.events.table import Event
from dalsegno.logs import ReadReport, RunFile, read_records
from dalsegno.testing import FaultPlan, check_resume, compare_runs, start_ranks
from support.runs import busy_fsdp, busy_trainer, forgetful_trainer, frozen_trainer, train_with_a_victim

SEED = 2026


def before_the_first_checkpoint(dice: random.Random) -> list[FaultPlan]:
    return [
        FaultPlan(operation="any", count=dice.randint(1, 8)),
        FaultPlan(event=Event.MICROBATCH_END, count=dice.randint(1, 4)),
    ]


def between_steps(dice: random.Random) -> list[FaultPlan]:
    return [
        FaultPlan(event=Event.STEP_DONE, count=dice.randint(2, 6)),
        FaultPlan(event=Event.STEP_BEGIN, count=dice.randint(2, 6)),
        FaultPlan(event=Event.AFTER_BACKWARD, count=dice.randint(4, 12)),
        FaultPlan(event=Event.OPTIMIZER_STEP, count=dice.randint(2, 6)),
        FaultPlan(event=Event.EVALUATE, count=1),
    ]


def in_a_save(dice: random.Random) -> list[FaultPlan]:
    return [
        FaultPlan(event=Event.BEFORE_SAVE, count=2),
        *(FaultPlan(operation="any", path=".partial", count=dice.randint(20, 50)) for _ in range(3)),
        FaultPlan(operation="write", path="manifest.json", count=2),
        FaultPlan(operation="fsync", path="manifest.json", count=2),
        FaultPlan(operation="rename", path="checkpoints/step-", count=2),
        FaultPlan(event=Event.SAVE, count=2),
        FaultPlan(operation="unlink", path="checkpoints/step-", count=2),
    ]


def in_a_log(dice: random.Random) -> list[FaultPlan]:
    return [
        FaultPlan(operation="write", path="train.jsonl", count=dice.randint(2, 4)),
        FaultPlan(operation="write", path="gradient_norms.jsonl", count=1),
        FaultPlan(operation="fsync", path="train.jsonl", count=dice.randint(1, 2)),
        FaultPlan(operation="rename", path="run.json", count=3),
    ]


def at_an_epochs_end(dice: random.Random) -> list[FaultPlan]:
    return [FaultPlan(event=Event.EPOCH_END), FaultPlan(event=Event.EPOCH_BEGIN)]


def while_resuming() -> list[FaultPlan]:
    """The second plan leaves a record behind its last checkpoint, wherever that is; the third dies at its rewinding."""
    leaves_a_tail = FaultPlan(event=Event.LOG)  # comes after the loggers, and before the save of its step
    return [FaultPlan(event=Event.LOAD), leaves_a_tail, FaultPlan(operation="any", path="rewound")]


def shuffled(dice: random.Random, *groups: list[FaultPlan]) -> list[FaultPlan]:
    plans = [plan for group in groups for plan in group]
    dice.shuffle(plans)
    return plans


def assert_no_trace_of_the_kills(output_dir: Path) -> None:
    """Beside the same content: no half checkpoint, no torn line in a log, no temporary file."""
    names = [path.name for path in (output_dir / "checkpoints").iterdir()]
    assert all(name.startswith("step-") and name[5:].isdigit() for name in names), names
    assert not list(output_dir.rglob("*.tmp"))
    for log in (output_dir / "logs").glob("*.jsonl"):
        report = ReadReport()
        assert list(read_records(log, report))
        assert not report.skipped


def test_one_process(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    plans = before_the_first_checkpoint(dice)
    plans += shuffled(dice, between_steps(dice), in_a_save(dice), in_a_log(dice), at_an_epochs_end(dice))
    plans += while_resuming()
    by_time = [FaultPlan(seconds=dice.uniform(0.05, 0.4)) for _ in range(3)]  # last, since they may come too late
    assert len(plans) + len(by_time) >= 25
    lines: list[str] = []
    comparison = check_resume(busy_trainer, [*plans, *by_time], folder=tmp_path, say=lines.append)
    assert comparison.identical, f"\n{comparison.table()}"
    assert [line for line in lines[1 : 1 + len(plans)] if not line.startswith("killed")] == []
    assert_no_trace_of_the_kills(tmp_path / "killed")


def test_frozen_parameters_whose_file_is_linked(tmp_path: Path) -> None:
    """Before, at and behind each link to the checkpoint before, and where a checkpoint that has it too is deleted."""
    plans = [
        FaultPlan(operation="link", count=1),
        FaultPlan(operation="link", count=3),
        FaultPlan(operation="fsync", path="frozen-00000", count=2),
        FaultPlan(operation="fsync", path=".partial/model", count=2),
        FaultPlan(operation="rename", path="checkpoints/step-", count=2),
        FaultPlan(operation="unlink", path="checkpoints/step-", count=2),
    ]
    lines: list[str] = []
    comparison = check_resume(frozen_trainer, plans, folder=tmp_path, say=lines.append)
    assert comparison.identical, f"\n{comparison.table()}"
    assert [line for line in lines[1 : 1 + len(plans)] if not line.startswith("killed")] == []
    assert_no_trace_of_the_kills(tmp_path / "killed")
    for folder in ("killed", "reference"):
        files = sorted((tmp_path / folder / "checkpoints").glob("*/model/frozen-00000.safetensors"))
        assert len({file.stat().st_ino for file in files}) == 1 < len(files)


def test_two_ranks_of_fsdp(tmp_path: Path) -> None:
    dice = random.Random(SEED + 1)
    plans = before_the_first_checkpoint(dice)[1:]
    plans += shuffled(
        dice, between_steps(dice)[:3], in_a_save(dice)[3:7:3], in_a_log(dice)[:1], at_an_epochs_end(dice)[:1]
    )
    lines: list[str] = []
    comparison = check_resume(busy_fsdp, plans, folder=tmp_path, world_size=2, say=lines.append)
    assert comparison.identical, f"\n{comparison.table()}"
    assert all(line.startswith("killed") for line in lines[1 : lines.index("resumed: finished")])
    assert_no_trace_of_the_kills(tmp_path / "killed")


@pytest.mark.parametrize("victim", [0, 1])
def test_any_rank_of_ddp(tmp_path: Path, victim: int) -> None:
    """Whichever rank is killed: the others end too, and all continue from the same checkpoint."""
    dice = random.Random(SEED + 2 + victim)
    plans = [
        FaultPlan(event=Event.AFTER_FORWARD, count=dice.randint(1, 3)),
        FaultPlan(operation="any", path=".partial", count=dice.randint(2, 5)),
        FaultPlan(event=Event.STEP_BEGIN, count=dice.randint(5, 8)),  # the first checkpoint is published
    ]
    for plan in plans:
        outcomes = start_ranks(train_with_a_victim, 2, tmp_path / "killed", plan, victim).wait()
        assert outcomes[victim].was_killed, plan
        assert outcomes[1 - victim].exit_code != 0, plan
    for folder in ("killed", "reference"):
        outcomes = start_ranks(train_with_a_victim, 2, tmp_path / folder, None, victim).wait()
        assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert RunFile(tmp_path / "killed").legs()[-1].first_step > 0
    comparison = compare_runs(tmp_path / "reference", tmp_path / "killed")
    assert comparison.identical, f"\n{comparison.table()}"
    assert_no_trace_of_the_kills(tmp_path / "killed")


def test_a_callback_that_forgets_its_state_is_found_out(tmp_path: Path) -> None:
    """What all of this rests on: a difference is seen, and named."""
    plan = FaultPlan(event=Event.STEP_BEGIN, count=6)
    comparison = check_resume(forgetful_trainer, [plan], folder=tmp_path)
    differing = [row for row in comparison.rows if not row.identical]
    assert [row.what for row in differing] == ["callbacks.RunningLoss"]
    assert ".average: 1 of 1 elements differ" in (differing[0].difference or "")
