"""Async saves on two ranks with a fault on one of them: one outcome on all ranks, nothing half published, no hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dalsegno.checkpoint import Checkpoint, CheckpointManager, checkpoint_dir
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.manifest import Manifest
from dalsegno.testing import run_ranks, start_ranks
from support.async_saves import (
    TROUBLES,
    save_while_one_is_killed,
    save_while_one_is_stuck,
    save_while_rank_one_is_killed_by_rank_zero,
    train_on_a_failing_disk,
    train_with_diaries,
    train_with_trouble,
)


def test_an_error_on_one_rank_at_each_stage(tmp_path: Path) -> None:
    """No rank has saved, and rank 0 logs the reason; all ranks continue, and the next save succeeds."""
    (saved, messages), (also_saved, silent) = run_ranks(train_with_trouble, 2, tmp_path)
    good = [step for step in range(1, 22) if step not in TROUBLES]
    assert saved == also_saved == good
    assert silent == [] and len(messages) == len(TROUBLES)
    for line, (step, (rank, operation, what)) in zip(messages, TROUBLES.items(), strict=True):
        cause = {"durable": "SystemExit: 3" if what == "an exit" else "no log today"}.get(operation, f"no {operation}")
        where = f"rank {rank}: " if step in (4, 6, 8, 18, 20) else ""
        assert line.startswith(f"step-{step:08d} was not saved: {where}") and cause in line, line
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in good]
    for name in names:
        checkpoint = Checkpoint.open(tmp_path / "checkpoints" / name)
        checkpoint.verify(checkpoint.manifest.files)


def test_files_that_are_on_another_disk_are_not_published(tmp_path: Path) -> None:
    """As where each host has a disk of its own under the run's name."""
    partial, final = tmp_path / "step-00000001.partial", tmp_path / "step-00000001"
    partial.mkdir()
    manifest = Manifest(
        step=1,
        world_size=2,
        torch="2",
        dalsegno="1",
        created="now",
        metrics={},
        best=False,
        finite=True,
        files={"model/shard-00001.safetensors": FileRecord(8, "0" * 32)},
        components={},
        data_ranks=(),
    )
    with pytest.raises(FileNotFoundError):
        checkpoint_dir.publish(manifest, partial, final)
    assert not final.exists() and [*partial.iterdir()] == []


# --- one rank is gone -------------------------------------------------------------------------------------------------

BEFORE_IT_IS_PUBLISHED = {
    "rank 1 before it has written": (1, "write", "rank-00001.safetensors"),
    "rank 1 before it has written all": (1, "fsync", "rank-00001.json"),
    "rank 0 before there is a folder": (0, "mkdir", "step-00000002.partial"),
    "rank 0 before it has written": (0, "write", "index.json"),
    "rank 0 before the manifest": (0, "write", "manifest.json"),
    "rank 0 before the name": (0, "rename", "step-00000002"),
}


@pytest.mark.parametrize("when", BEFORE_IT_IS_PUBLISHED)
def test_killed_before_it_is_published(tmp_path: Path, when: str) -> None:
    victim, operation, end = BEFORE_IT_IS_PUBLISHED[when]
    outcomes = start_ranks(save_while_one_is_killed, 2, tmp_path, victim, operation, end).wait()
    assert outcomes[victim].was_killed, outcomes[victim]
    reason, names = outcomes[1 - victim].value
    verdict = "may not have been saved" if victim == 0 else "was not saved"
    assert reason.startswith(f"step-00000002 {verdict}: the connection between the ranks was lost (")
    assert "step-00000001" in names and "step-00000002" not in names
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 1


def test_rank_zero_is_killed_when_it_is_published(tmp_path: Path) -> None:
    """The other rank cannot know the outcome, and its error says so."""
    outcomes = start_ranks(save_while_one_is_killed, 2, tmp_path, 0, "after rename", "step-00000002").wait()
    assert outcomes[0].was_killed
    reason, names = outcomes[1].value
    assert reason.startswith("step-00000002 may not have been saved: the connection between the ranks was lost (")
    assert names == ["step-00000001", "step-00000002"]
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 2


@pytest.mark.parametrize(("operation", "end"), [("write", "manifest.json"), ("rename", "step-00000002")])
def test_rank_one_is_killed_when_all_is_written(tmp_path: Path, operation: str, end: str) -> None:
    """It is published all the same, and rank 0 does not say otherwise."""
    outcomes = start_ranks(save_while_rank_one_is_killed_by_rank_zero, 2, tmp_path, operation, end).wait()
    assert outcomes[1].was_killed
    assert outcomes[0].value == ("", ["step-00000001", "step-00000002"])
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 2


def test_a_rank_that_is_stuck_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    (reason, names), (other, _) = run_ranks(save_while_one_is_stuck, 2, tmp_path)
    assert reason.startswith("step-00000002 was not saved: the connection between the ranks was lost (")
    assert other.startswith("step-00000002 may not have been saved: the connection between the ranks was lost (")
    assert "step-00000002" not in names


# --- what a callback has written --------------------------------------------------------------------------------------


def test_what_a_state_refers_to_is_durable_on_all_ranks_before_the_manifest(tmp_path: Path) -> None:
    events, _ = run_ranks(train_with_diaries, 2, tmp_path)
    assert events == ["durable-0 durable-1"]


# --- how a run ends when saves fail -----------------------------------------------------------------------------------

NO_SPACE = "was not saved: rank 1: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("bad", "max_steps", "abort_at", "end"),
    [
        ({4}, 6, None, "finished at step 6, with step-00000006"),
        ({4, 6}, 20, None, rf"SaveFailed at step [678]: step-00000006 {re.escape(NO_SPACE)}"),
        ({6}, 6, None, f"SaveFailed at step 6: step-00000006 {re.escape(NO_SPACE)}"),
        ({4}, 6, 5, "aborted at step 5, with step-00000002"),
    ],
    ids=["one", "two in a row", "the last one", "one before an end without a checkpoint"],
)
def test_all_ranks_end_alike(tmp_path: Path, bad: set[int], max_steps: int, abort_at: int | None, end: str) -> None:
    first, second = run_ranks(train_on_a_failing_disk, 2, tmp_path, frozenset(bad), max_steps, abort_at)
    assert first == second and re.fullmatch(end, first), (first, second)
