"""Small shares of ``make soak``, ``make proofs``, ``make memory`` and others: nothing is lost, no alarm is false."""

from __future__ import annotations

from pathlib import Path

import pytest

from durability import diloco, memory, proofs, rollbacks
from durability.soak import soak, table


def test_workers_and_server_of_diloco_lose_nothing(tmp_path: Path) -> None:
    """A small share of ``make diloco``."""
    kills, differences = diloco.soak(4, tmp_path, seed=3, by_clock=False)
    assert kills >= 4
    assert differences == []


@pytest.mark.parametrize(("world_size", "kills"), [(1, 4), (2, 2)])
def test_nothing_is_lost_in_memory(tmp_path: Path, world_size: int, kills: int) -> None:
    """A small share of ``make memory``."""
    tally = memory.soak(kills, world_size, tmp_path, seed=5, say=lambda tally: None)
    assert tally.kills >= kills
    assert tally.is_flawless, table([tally])


def test_nothing_is_lost(tmp_path: Path) -> None:
    """A small share of ``make soak``, on one rank: two of them are killed above, and in ``test_kills``."""
    tally = soak(9, 1, tmp_path, seed=7, say=lambda tally: None)
    assert tally.kills >= 9 and tally.resumes > 0
    assert tally.is_flawless, table([tally])


@pytest.mark.parametrize(("layout", "kills"), [("ddp", 2), ("tp", 2), ("pp", 2)])
def test_no_alarm_is_false(tmp_path: Path, layout: str, kills: int) -> None:
    """A small share of ``make proofs``."""
    tally = proofs.soak(kills, layout, tmp_path, seed=11, say=lambda tally: None)
    assert tally.is_flawless, table([tally])


def test_a_rollback_may_be_killed_before_any_file_operation(tmp_path: Path) -> None:
    assert rollbacks.differences(tmp_path, every=24) == []
