"""Ranks of run_ranks, whatever their function does."""

from __future__ import annotations

from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks


def test_a_rank_may_end_at_once() -> None:
    """Also while another is still connecting to it: no rank waits for the others by itself."""
    for _ in range(5):
        assert run_ranks(collectives.rank, 4) == [0, 1, 2, 3]
