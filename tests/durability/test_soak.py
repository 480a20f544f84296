"""Small shares of ``make soak``, ``make memory``, ``make diloco`` and ``make rollbacks``: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from durability import diloco, memory, rollbacks
from durability.soak import soak


def test_workers_and_server_of_diloco_lose_nothing(tmp_path: Path) -> None:
    """A small share of ``make diloco``."""
    kills, differences = diloco.soak(4, tmp_path, seed=3, by_clock=False)
    assert kills >= 4
    assert differences == []


@pytest.mark.parametrize(("world_size", "kills"), [(1, 7), (2, 4)])
def test_nothing_is_lost_in_memory(tmp_path: Path, world_size: int, kills: int) -> None:
    """A small share of ``make memory``."""
    tally = memory.soak(kills, world_size, tmp_path, seed=5, say=lambda tally: None)
    assert tally.kills >= kills
    assert tally.differences == []
    assert (tally.lost_records, tally.differing_bits) == (0, 0)


@pytest.mark.parametrize(("world_size", "kills"), [(1, 18), (2, 7)])
def test_nothing_is_lost(tmp_path: Path, world_size: int, kills: int) -> None:
    tally = soak(kills, world_size, tmp_path, seed=7, say=lambda tally: None)
    assert tally.kills >= kills and tally.resumes > 0
    assert tally.differences == []
    assert (tally.lost_records, tally.differing_bits) == (0, 0)


def test_a_rollback_may_be_killed_before_any_file_operation(tmp_path: Path) -> None:
    assert rollbacks.differences(tmp_path, every=16) == []
