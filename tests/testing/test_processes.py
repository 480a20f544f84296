"""Ranks of run_ranks, whatever their function does."""

from __future__ import annotations

import signal
import time

import pytest

from dalsegno.distributed import collectives
from dalsegno.errors import RankFailed
from dalsegno.testing import processes, run_ranks, start_ranks


def test_a_rank_may_end_at_once() -> None:
    """Also while another is still connecting to it: no rank waits for the others by itself."""
    for _ in range(5):
        assert run_ranks(collectives.rank, 4) == [0, 1, 2, 3]


def fail_or_wait() -> None:
    if collectives.rank() == 1:
        raise ValueError("this one")
    time.sleep(600)


def test_a_rank_that_waits_for_one_that_has_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.1)
    waited, failed = start_ranks(fail_or_wait, 2).wait()
    assert (waited.exit_code, waited.error) == (-signal.SIGKILL, "killed 0.1 s after rank 1 had failed")
    assert not waited.was_killed  # as by a test that kills it
    assert failed.exit_code == 1
    assert "ValueError: this one" in str(failed.error)


def test_ranks_that_wait_for_nothing_are_ended_in_time() -> None:
    with pytest.raises(RankFailed, match=r"timeout after .* s; ended: ranks \[\] of 1"):
        run_ranks(time.sleep, 1, 600, timeout=0.1)
