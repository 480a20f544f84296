"""Why a leg ended: the first cause among what its ranks left; and whether restarts lead anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dalsegno.launcher.findings import (
    Finding,
    OutOfMemoryKills,
    RankError,
    RestartProgress,
    first_cause,
    judge,
    publish,
    published,
)

LOST = RankError("RuntimeError: Connection closed by peer", 2.0)
BROKEN = RankError("ValueError: broken", 1.0)


@pytest.mark.parametrize(
    ("exits", "errors", "out_of_memory", "cause"),
    [
        ({0: 1, 1: -9}, {0: LOST}, False, "rank 1 was killed by SIGKILL"),
        ({0: 1, 1: -9}, {0: LOST}, True, "rank 1 was killed for lack of memory (SIGKILL)"),
        ({0: 1, 3: -11}, {0: LOST}, True, "rank 3 was killed by SIGSEGV"),
        ({0: 1, 1: 1}, {0: LOST, 1: BROKEN}, False, "rank 1 raised ValueError: broken"),
        ({2: 7}, {}, False, "rank 2 ended with exit status 7"),
    ],
)
def test_the_first_cause_is_named(
    exits: dict[int, int], errors: dict[int, RankError], out_of_memory: bool, cause: str
) -> None:
    found = judge(exits, errors, out_of_memory=out_of_memory)
    assert found is not None and found.cause == cause
    assert Finding(*json.loads(json.dumps(found))) == found


def test_of_several_hosts_the_one_that_knows_is_believed() -> None:
    derived, certain = Finding("rank 0 raised it", False, 1.0), Finding("rank 5 was killed", True, 2.0)
    assert first_cause([derived, certain]) == certain
    assert first_cause([]) is None


def test_what_a_host_asks_for_does_not_grow_with_their_number() -> None:
    """All have lost a rank at once, and each has offered its finding before it looks."""
    store = CountingStore()
    lost = [Finding(f"rank {number} raised it", False, float(number)) for number in range(1000)]
    for finding in [*lost[500:], Finding("rank 5 was killed", True, 700.0), *lost[:500]]:
        publish(store, finding)
    found = {published(store) for _ in range(1001)}
    assert found == {Finding("rank 5 was killed", True, 700.0)}
    assert store.requests <= 4 * 1001
    assert published(CountingStore()) is None


class CountingStore:
    """A store of one process, with the number of requests."""

    def __init__(self) -> None:
        self.requests, self._store = 0, dist.HashStore()

    def __getattr__(self, request: str) -> Any:
        self.requests += 1
        return getattr(self._store, request)


def test_a_kill_for_lack_of_memory_is_seen_by_the_kernels_counter(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    kills = OutOfMemoryKills([tmp_path / "missing", events])
    assert not kills.happened()
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert [kills.happened(), kills.happened()] == [True, False]


@pytest.mark.parametrize(
    ("reached", "goes_on"),
    [
        ([7, 7, 7], [True, True, False]),
        ([7, 5, 7], [True, True, False]),
        ([7, 9, 9, 12, 10, 11], [True, True, True, True, True, False]),
        ([-1, -1, -1, -1], [True, True, True, True]),
    ],
)
def test_three_legs_without_progress_are_enough(reached: list[int], goes_on: list[bool]) -> None:
    progress = RestartProgress()
    assert [progress.note(step) for step in reached] == goes_on
