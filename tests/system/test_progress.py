"""A wait for a thread that lasts as long as the thread makes progress."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dalsegno.system import progress
from dalsegno.system.progress import Progress


class Clock:
    """Time that passes only in waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize(("until", "is_done"), [(3, True), (None, False)])
def test_a_thread_that_moves_is_waited_for_and_one_that_stalls_is_not(
    until: int | None, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes move in the first two waits; then the thread ends, or nothing more happens."""
    clock, moving, waits, reports = Clock(monkeypatch), Progress(), [], []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.now += seconds
        if len(waits) <= 2:
            moving.advance(10)
        return len(waits) == until

    assert moving.wait(wait, patience=12.0, report=lambda: reports.append(moving.bytes)) == is_done
    assert waits == ([5.0, 5.0, 5.0] if is_done else [5.0, 5.0, 5.0, 5.0, 2.0])
    assert reports == ([10, 20] if is_done else [10, 20, 20, 20])


@pytest.mark.parametrize("moves_again", [False, True])
def test_a_thread_that_waits_for_others_does_not_count_as_stalled(
    moves_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, paused, waits = Clock(monkeypatch), Progress(), []
    paused.pause()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if moves_again and len(waits) == 3:
            paused.advance(1)
        clock.now += 1000.0
        return len(waits) == 4

    assert paused.wait(wait, patience=1.0, report=int) != moves_again
    assert waits == [5.0] * (3 if moves_again else 4)
