"""Hosts: which ranks share a memory, for work that one rank of each host does.

Two containers with separate shared memories count as two hosts, wherever they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

from . import collectives

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Number of each rank's host, from 0 in the order of their lowest ranks. Equal on all ranks."""

    of_rank: tuple[int, ...]

    @classmethod
    def sharing(cls, place: object) -> Self:
        """Group the ranks with equal ``place``, which identifies a memory. Collective."""
        numbers: dict[object, int] = {}
        places = collectives.gather(place, "which ranks share memory")
        return cls(tuple(numbers.setdefault(each, len(numbers)) for each in places))

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    @property
    def here(self) -> int:
        """Number of this rank's host."""
        return self.of_rank[collectives.rank()]

    @property
    def leads(self) -> bool:
        """Whether this rank is the lowest of its host."""
        return self.ranks(self.here)[0] == collectives.rank()

    @property
    def position(self) -> int:
        """Number of this rank among those of its host, from 0."""
        return self.ranks(self.here).index(collectives.rank())

    def ranks(self, host: int) -> list[int]:
        """Ranks of a host, in order."""
        return [rank for rank, number in enumerate(self.of_rank) if number == host]

    def run(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on the lowest rank of each host. Collective.

        Raises Exception on every rank, if ``work`` fails on one, as :func:`collectives.run_on_all_ranks` does.

        Returns:
            The results by host, on every rank.
        """
        result = collectives.run_on_all_ranks(lambda: work() if self.leads else cast(T, None))
        return self.by_host(collectives.gather(result, "results of all hosts"))

    def by_host(self, of_ranks: Sequence[T]) -> list[T]:
        """Pick, from one value for each rank, that of the lowest rank of each host."""
        return [of_ranks[self.ranks(host)[0]] for host in range(self.count)]
