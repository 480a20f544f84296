"""A start that the user chooses, from scratch or from a path, is completed by the next start if it is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import RunFile
from dalsegno.system import filesystem
from dalsegno.testing import FaultPlan, compare_runs, start_ranks
from dalsegno.training.rollback import RECOVERIES
from support.commanded import Client
from support.small import small_trainer

HALVED = [("set", {"learning_rate": {"factor": 0.5}})]
START = ".start"


class RollsBackOnce(ds.Callback):
    def on_step_end(self, ctx: Any) -> None:
        if ctx.step == 4 and not (ctx.args.directory / RECOVERIES).exists():
            ctx.control.roll_back("bad")


class NeverRollsBack(ds.Callback):
    pass


def first_run(output_dir: Path) -> None:
    """Six steps, with commands at the third and the fifth, and a rollback that lowers the learning rate."""
    trainer(output_dir, Client({3: HALVED, 5: HALVED}), RollsBackOnce()).train()


def trainer(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(
        output_dir,
        *callbacks,
        JsonLogger(),
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        save_in_background=False,
        recovery=ds.RecoveryPolicy(lr_factor=0.5, lr_steps=2),
    )


Operations = list[tuple[str, str]]
"""Kind, and path relative to the run's directory."""


def leg(output_dir: Path, origin: bool | str, count: int | None) -> Operations:
    """Killed before operation number ``count``; without a kill, its operations."""
    seen: Operations = []
    filesystem.watcher = lambda kind, path: seen.append((kind, str(path).removeprefix(f"{output_dir}/")))
    if count is not None:
        FaultPlan(operation="any", count=count).arm()
    trainer(output_dir, Client({}), NeverRollsBack()).train(origin)
    return seen


def start(output_dir: Path, origin: bool | str, count: int | None = None) -> Operations:
    (outcome,) = start_ranks(leg, 1, output_dir, origin, count).wait()
    assert outcome.was_killed if count else outcome.exit_code == 0, outcome.error
    return outcome.value or []


def old_run(folder: Path) -> Path:
    (outcome,) = start_ranks(first_run, 1, folder).wait()
    assert outcome.exit_code == 0, outcome.error
    return folder


CHOICES: dict[str, Callable[[Path], bool | str]] = {
    "anew": lambda output_dir: False,
    "from a path": lambda output_dir: str(output_dir / "checkpoints/step-00000002"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_killed_before_each_operation_it_is_completed_by_the_next_start(tmp_path: Path, choice: str) -> None:
    """Until the choice is on disk, the run stays as it was."""
    old = old_run(tmp_path / "old")
    whole = tmp_path / "whole"
    shutil.copytree(old, whole)
    seen = start(whole, CHOICES[choice](whole))
    begun = seen.index(("rename", "run.json"), seen.index(("unlink", START)))
    chosen = seen.index(("rename", START))
    assert not compare_runs(old, whole).identical
    for number, (kind, path) in enumerate(seen[: begun + 1]):
        if kind == "fsync":
            continue
        parts = tmp_path / f"parts-{number}"
        shutil.copytree(old, parts)
        start(parts, CHOICES[choice](parts), number + 1)
        start(parts, True)
        comparison = compare_runs(old if number <= chosen else whole, parts)
        assert comparison.identical, f"killed before {kind} {path}\n{comparison.table()}"
        assert not (parts / START).exists()
        archives = sorted(path.name for path in (parts / "rewound").glob("timeline.*"))
        assert archives == sorted(path.name for path in ((old if number <= chosen else whole) / "rewound").iterdir())


def test_the_user_may_choose_again(tmp_path: Path) -> None:
    """What was chosen before is not completed then."""
    run = old_run(tmp_path / "run")
    shutil.copytree(run, tmp_path / "whole")
    seen = start(tmp_path / "whole", str(tmp_path / "whole/checkpoints/step-00000002"))
    assert start(tmp_path / "whole", False)
    moved = seen.index(("rename", "rewound/timeline.0002/checkpoints/step-00000004"))
    start(run, str(run / "checkpoints/step-00000002"), moved + 1)
    start(run, False)
    assert compare_runs(run, tmp_path / "whole").identical
    assert not (run / START).exists()


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    run = old_run(tmp_path)
    for damage in ("", '{"checkpoint": null, "archive": "../elsewhere"}'):
        (run / START).write_text(damage)
        with pytest.raises(ds.StateMismatch, match=r"\.start: damaged .*choose again: pass resume_from_checkpoint="):
            trainer(run, Client({}), NeverRollsBack()).train()
    trainer(run, Client({}), NeverRollsBack()).train(False)
    assert not (run / START).exists() and RunFile(run).load().legs[-1].first_step == 0


def test_a_checkpoint_of_another_run_is_resumed_from_until_there_is_one_of_its_own(tmp_path: Path) -> None:
    """At each place of a kill: while files are moved, before the leg begins, and before its first checkpoint. Each such
    start continues the log in a file of its own, with a warning, since the present one is not the other run's."""
    old, other = old_run(tmp_path / "old"), old_run(tmp_path / "other")
    chosen = str(other / "checkpoints/step-00000002")
    whole = tmp_path / "whole"
    shutil.copytree(old, whole)
    seen = start(whole, chosen)
    first = next(number for number, (_, path) in enumerate(seen) if path == "checkpoints/step-00000004.partial")
    for number in [*range(seen.index(("rename", START)) + 1, first, 4), first]:
        parts = tmp_path / f"parts-{number}"
        shutil.copytree(old, parts)
        start(parts, chosen, number + 1)
        start(parts, True)
        rows = [
            row for row in compare_runs(whole, parts).rows if "JsonLogger" not in row.what and "logs/" not in row.what
        ]
        assert [row.difference for row in rows if row.difference] == [], f"killed before {seen[number]}"
    shutil.rmtree(whole / "checkpoints")
    shutil.rmtree(other)
    with pytest.raises(ds.NotFound, match="step-00000002") as caught:
        trainer(whole, Client({}), NeverRollsBack()).train()
    assert "False to start anew" in caught.value.__notes__[0]
