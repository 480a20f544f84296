"""Numbers of every rank that travel together."""

from __future__ import annotations

import pytest

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered, gather_together
from dalsegno.errors import ConfigurationError
from dalsegno.testing import run_ranks
from support.exchanges import Exchanges


def fetched_and_read() -> dict[str, object]:
    """What a rank receives of two that are fetched together, how often it measures, and of one that is read twice."""
    rank = float(collectives.rank())
    measured: list[str] = []

    def measure(name: str, *numbers: float) -> list[float]:
        measured.append(name)
        return [rank, *numbers]

    one = Gathered(lambda: measure("one", 0.5), "one")
    two = Gathered(lambda: measure("two", 1.5, 2.5), "two")
    gather_together(one, two)
    together = [*measured], one.by_rank(), two.by_rank()
    again = one.by_rank()
    gather_together(one, two)
    two.forget()
    forgotten = two.by_rank()
    return {"together": together, "again": again, "forgotten": forgotten, "measured": measured}


@pytest.mark.parametrize("ranks", [1, 2])
def test_those_that_are_fetched_together_are_read_one_by_one(ranks: int) -> None:
    ones = [[float(rank), 0.5] for rank in range(ranks)]
    twos = [[float(rank), 1.5, 2.5] for rank in range(ranks)]
    for seen in run_ranks(fetched_and_read, ranks):
        assert seen["together"] == (["one", "two"], ones, twos)
        assert seen["again"] == ones, "what was read is gathered anew"
        assert seen["forgotten"] == twos
        assert seen["measured"] == ["one", "two", "one", "one", "two", "two"]


def ask_rank_zero(fails: bool) -> tuple[list[object], int]:
    """What a rank is answered by rank 0, which runs ahead; and in how many exchanges."""
    answers: list[object] = []

    def fail() -> object:
        raise ConfigurationError("as rank 0 finds")

    with Exchanges() as exchanges:
        try:
            with collectives.rank_zero_ahead():
                answers.append(collectives.from_rank_zero(lambda: "one"))
                answers.append(collectives.from_rank_zero(lambda: {"two": collectives.rank()}))
                answers.append(collectives.all_reduce_max([collectives.rank()], "between"))
                answers.append(collectives.from_rank_zero(fail if fails else lambda: "x" * 5000))
        except ConfigurationError as error:
            answers.append(str(error))
    return answers, exchanges.counts.total()


@pytest.mark.parametrize("fails", [False, True])
def test_rank_zero_runs_ahead_until_all_meet(fails: bool) -> None:
    for rank, (answers, exchanges) in enumerate(run_ranks(ask_rank_zero, 2, fails)):
        failure = "as rank 0 finds" if rank == 0 else "rank 0: as rank 0 finds"
        assert answers == ["one", {"two": 0}, [1], failure if fails else "x" * 5000]
        assert exchanges == (3 if fails else 4), "a long answer needs a broadcast"


def stop_ahead() -> list[object]:
    """What a rank is answered by rank 0 before all find the same error."""
    answers: list[object] = []
    with pytest.raises(ConfigurationError, match="as all find"), collectives.rank_zero_ahead():
        answers.append(collectives.from_rank_zero(lambda: "one"))
        raise ConfigurationError("as all find")
    return [*answers, *collectives.gather(collectives.rank(), "after it")]


def test_an_error_that_all_find_leaves_none_without_an_answer() -> None:
    assert run_ranks(stop_ahead, 2) == [["one", 0, 1]] * 2


def compare(values: list[object]) -> tuple[object, bool, int]:
    """What a rank finds, whether the others have found the same, and the exchanges that takes."""
    with Exchanges() as exchanges:
        found, are_equal = collectives.run_and_compare(lambda: values[collectives.rank()], lambda found: found)
    return found, are_equal, exchanges.counts.total()


@pytest.mark.parametrize(
    ("values", "are_equal"),
    [([{"a": [1.5]}, {"a": [1.5]}], True), ([{"a": [1.5]}, {"a": [2.5]}], False), ([1, "1"], False)],
)
def test_what_all_ranks_have_found_is_compared_in_one_exchange(values: list[object], are_equal: bool) -> None:
    assert run_ranks(compare, 2, values) == [(found, are_equal, 1) for found in values]
