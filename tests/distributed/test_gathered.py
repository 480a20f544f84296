"""Numbers of every rank that travel together."""

from __future__ import annotations

import pytest

from dalsegno.distributed import collectives
from dalsegno.distributed.collectives import Gathered, gather_together
from dalsegno.testing import run_ranks


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
