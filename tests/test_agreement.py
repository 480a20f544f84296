"""Ranks act on one rank's wish at one step, wherever it came from."""

from __future__ import annotations

from dalsegno.state import Wishes
from dalsegno.testing import run_ranks
from support.agreeing import agree_on_what_rank_one_sees


def test_what_one_rank_sees_all_act_on_at_one_step() -> None:
    first, second = run_ranks(agree_on_what_rank_one_sees, 2, False)
    assert first == second
    step, wishes, why, stopping = first
    assert step >= 50
    assert (wishes, why, stopping) == (Wishes(stop=True, landed=True), "seen by rank 1", True)


def test_at_that_step_where_each_one_counts() -> None:
    first, second = run_ranks(agree_on_what_rank_one_sees, 2, True)
    assert first == second
    assert first[0] == 50
