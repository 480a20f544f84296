"""Gaps: places of a data order that a run does not read.

A place counts what was consumed of an epoch, in samples or micro-batches. A gap belongs to one epoch: in the next one,
a shuffled order has other samples at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .permutation import Indices


class Place(NamedTuple):
    """A place in the data. ``consumed``: in ``epoch``, in the loader's unit."""

    epoch: int
    consumed: int


class Span(NamedTuple):
    """The data from one place to another, exclusive. An ``end`` beyond its epoch's data is the epoch's end."""

    begin: Place
    end: Place


@dataclass(frozen=True, slots=True)
class EpochGaps:
    """Gaps of one epoch of ``length`` samples: sorted, disjoint, not touching, inside the epoch."""

    length: int
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    kept: int = field(init=False)
    """Number of samples outside of all gaps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.length - sum(self.ends) + sum(self.begins))

    def rank_of(self, place: int) -> int:
        """Number of samples before ``place``, without those in gaps."""
        if not self.begins:
            return place
        before = [each for each in zip(self.begins, self.ends, strict=True) if each[0] < place]
        skipped = sum(min(place, end) - begin for begin, end in before)
        return place - skipped

    def next_place(self, rank: int) -> int:
        """Place of the sample that ``rank`` samples outside of gaps precede; the epoch's end if there is none."""
        if not self.begins:
            return min(rank, self.length)
        return int(self.places(np.array([rank], dtype=np.uint64))[0]) if rank < self.kept else self.length

    def places(self, ranks: Indices) -> Indices:
        """:meth:`next_place` of each rank below ``kept``, shape (n,)."""
        if not self.begins:
            return ranks
        sizes = np.array(self.ends, dtype=np.uint64) - np.array(self.begins, dtype=np.uint64)
        shifts: Indices = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(sizes, dtype=np.uint64)])
        begins = np.array(self.begins, dtype=np.uint64) - shifts[:-1]  # in ranks
        return ranks + shifts[np.searchsorted(begins, ranks, side="right")]


class Gaps:
    """The spans that a run does not read."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = [span for span in spans if span.begin < span.end]

    def of_epoch(self, epoch: int, length: int) -> EpochGaps:
        """The gaps of ``epoch``, which has ``length`` samples."""
        here = [span for span in self._spans if span.begin.epoch <= epoch <= span.end.epoch]
        parts = sorted((_consumed(span.begin, epoch, 0), _consumed(span.end, epoch, length)) for span in here)
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in ((min(begin, length), min(end, length)) for begin, end in parts):
            if begin >= end:
                continue
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return EpochGaps(length, tuple(begins), tuple(ends))

    def contains(self, place: Place) -> bool:
        """Whether ``place`` is inside one."""
        return any(span.begin <= place < span.end for span in self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)


def _consumed(place: Place, epoch: int, otherwise: int) -> int:
    return place.consumed if place.epoch == epoch else otherwise
