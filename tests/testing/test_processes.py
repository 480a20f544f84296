"""Ranks of run_ranks, whatever their function does."""

from __future__ import annotations

import time

import pytest

from dalsegno.distributed import collectives
from dalsegno.errors import RankFailed
from dalsegno.testing import processes, run_ranks


def test_a_rank_may_end_at_once() -> None:
    """Also while another is still connecting to it: no rank waits for the others by itself."""
    for _ in range(5):
        assert run_ranks(collectives.rank, 4) == [0, 1, 2, 3]


def fail_or_wait() -> None:
    if collectives.rank() == 1:
        raise ValueError("this one")
    time.sleep(600)


def test_of_ranks_that_wait_for_one_that_has_failed_its_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.1)
    with pytest.raises(RankFailed, match=r"(?s)ended: ranks \[1\] of 2.*rank 1 ended with 1.*ValueError: this one"):
        run_ranks(fail_or_wait, 2)
