"""Ranks act on one rank's request at one step, wherever it came from."""

from __future__ import annotations

import math

import pytest

from dalsegno.state import ControlRequests
from dalsegno.testing import run_ranks
from support.agreeing import (
    agree_on_what_rank_one_sees,
    come_to_different_places,
    exchanges_of_twenty_steps,
    say_many_numbers,
)


def test_what_one_rank_sees_all_act_on_at_one_step() -> None:
    first, second = run_ranks(agree_on_what_rank_one_sees, 2, False)
    assert first == second
    step, requests, why, stopping = first
    assert step >= 50
    assert (requests, why, stopping) == (ControlRequests(stop=True, save_done=True), "seen by rank 1", True)


def test_at_that_step_where_each_one_counts() -> None:
    first, second = run_ranks(agree_on_what_rank_one_sees, 2, True)
    assert first == second
    assert first[0] == 50


@pytest.mark.parametrize(("seconds", "exchanges"), [(0.08, 11), (0.3, 20)])
def test_what_a_record_exchanges_is_enough_while_it_comes_often(seconds: float, exchanges: int) -> None:
    """Two steps of 0.08 seconds need no other; the first step of all has one."""
    assert run_ranks(exchanges_of_twenty_steps, 2, seconds) == [exchanges, exchanges]


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (("step", "record"), ("the actions at a step's end", "the loss of a record")),
        (("step", "gather"), ("the actions at a step's end", "ExpertLoadBalance")),
        (("record", "longer"), ("exchange 2, 2 numbers", "exchange 2, 3 numbers")),
    ],
)
def test_ranks_that_meet_at_different_places_are_told_both(places: tuple[str, str], names: tuple[str, str]) -> None:
    """Neither takes what the other says for an answer: a loss is not a request to abort."""
    complaints = run_ranks(come_to_different_places, 2, *places)
    for rank, complaint in enumerate(complaints):
        assert complaint is not None
        here, there = complaint.split(", but ")
        assert f"rank {rank} called" in here
        assert names[rank] in here
        assert f"rank {1 - rank} called" in there
        assert names[1 - rank] in there


@pytest.mark.parametrize("place", ["step", "record", "gather"])
def test_a_collective_of_the_programs_own_is_no_answer(place: str) -> None:
    complaint, _ = run_ranks(come_to_different_places, 2, place, "foreign")
    assert complaint is not None
    assert "not dalsegno's" in complaint


@pytest.mark.parametrize("length", [0, 1, 11, 12, 40])
def test_numbers_arrive_as_they_are(length: int) -> None:
    """However many they are, and whatever they are."""
    first, second = run_ranks(say_many_numbers, 2, length)
    assert repr(first) == repr(second)
    each, sums, maxima = first
    expected = [[float(rank), -0.0, math.inf, 5e-324, *range(length)][:length] for rank in range(2)]
    assert repr(each) == repr([[float(number) for number in row] for row in expected])
    assert sums == [a + b for a, b in zip(*expected, strict=True)]
    assert maxima == [2**62, *range(length)][:length]
