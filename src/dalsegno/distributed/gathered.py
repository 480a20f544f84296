"""Gathered: numbers of every rank, which may travel with those of others in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import collectives


class Gathered:
    """Numbers that each rank measures, and all ranks need.

    :func:`gather_together` fetches those of several at once. One that has not been fetched when it is read gathers its
    own. The ranks measure when the numbers are fetched.

    Args:
        measure: returns this rank's numbers, as many as on the other ranks.
        purpose: a few words for the error if the ranks are at different collectives.
    """

    def __init__(self, measure: Callable[[], Sequence[float]], purpose: str) -> None:
        self.measure = measure
        self.purpose = purpose
        self._fetched: list[list[float]] | None = None

    def by_rank(self) -> list[list[float]]:
        """Return every rank's numbers, in rank order, once. Collective, unless they have been fetched.

        Raises:
            RanksApart: if another rank is at a different collective.
        """
        fetched, self._fetched = self._fetched, None
        return collectives.gather_floats(self.measure(), self.purpose) if fetched is None else fetched

    def fetched(self, by_rank: list[list[float]]) -> None:
        """Keep every rank's numbers until they are read."""
        self._fetched = by_rank

    def forget(self) -> None:
        """Drop what has been fetched and is not going to be read."""
        self._fetched = None


def gather_together(first: Gathered, *others: Gathered) -> None:
    """Fetch the numbers of all of these, in one exchange with the purpose of the first. Collective.

    Raises:
        RanksApart: if another rank is at a different collective.
    """
    measured = [(each, each.measure()) for each in (first, *others)]
    rows = collectives.gather_floats([number for _, numbers in measured for number in numbers], first.purpose)
    begin = 0
    for each, numbers in measured:
        end = begin + len(numbers)
        each.fetched([row[begin:end] for row in rows])
        begin = end
