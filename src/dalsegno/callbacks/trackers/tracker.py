"""Tracker: the contract between dalsegno and one tracker's client, and the entries that a tracker receives.

A tracker runs on the sender's thread only. Any method may raise: the call is repeated later, with a new
connection. So ``open`` must find the run that an earlier process, or an earlier try, has begun.

==================  ===================================================================================================
``open(run)``       connects, and begins or continues the tracker's run ``run.id``
``has(entry)``      whether an earlier process's entry has arrived
``send(entries)``   hands over entries, in order; no :class:`Return` among them
``return_to``       goes back to a step, or marks that what follows belongs to a new timeline
``close(status)``   ends this leg's part of the run, so that everything handed over is stored
==================  ===================================================================================================
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from dalsegno.errors import StateMismatch
from dalsegno.logs.values import drop_wall_clock, encode, from_json

TIMELINE = "dalsegno/timeline"
"""Series that marks returns: the number of the timeline, from the first point of each on."""

Status = Literal["finished", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What identifies and describes the run."""

    id: str
    """The same over all legs: 16 hexadecimal digits of ``run.json``."""
    name: str
    directory: Path
    """For files that the client writes."""
    settings: Mapping[str, Any]
    """JSON values, without secrets."""
    code: Mapping[str, str]
    """Versions, and the git commit of the working directory."""


class Tracker(ABC):
    stores_at_once: bool = True
    """Whether an entry is stored once ``send`` has returned; else once ``close`` has."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def has(self, entry: Entry) -> bool: ...

    @abstractmethod
    def send(self, entries: Sequence[Entry]) -> None: ...

    @abstractmethod
    def close(self, status: Status) -> None: ...

    def return_to(self, point: Return) -> None:
        """Mark the return; for trackers that cannot forget points."""
        self.send([Points(point.step, point.time, {TIMELINE: point.timeline})])


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    kind: ClassVar[str]
    step: int
    time: float
    """UTC seconds."""


@dataclass(frozen=True, slots=True)
class Points(Entry):
    """The numbers of one record."""

    kind: ClassVar = "points"
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Text(Entry):
    kind: ClassVar = "text"
    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class Histogram(Entry):
    kind: ClassVar = "histogram"
    tag: str
    edges: list[float]
    """One more than ``counts``, ascending."""
    counts: list[float]


@dataclass(frozen=True, slots=True)
class Card(Entry):
    """Model card of a checkpoint."""

    kind: ClassVar = "card"
    name: str
    """Name of the checkpoint."""
    text: str
    """Markdown."""


@dataclass(frozen=True, slots=True)
class Return(Entry):
    """The run has returned to ``step``: what follows belongs to a new timeline, whose number is ``timeline``."""

    kind: ClassVar = "return"
    timeline: int
    """From 2: the first return begins the second timeline."""


_KINDS: dict[str, type[Entry]] = {each.kind: each for each in (Points, Text, Histogram, Card, Return)}
_NUMBERS = ("values", "edges", "counts")
"""Fields with floats that JSON has no numbers for."""


def replays(entry: Entry, earlier: Entry) -> bool:
    """Return whether the two contain the same, except for wall-clock fields."""
    if isinstance(entry, Points) and isinstance(earlier, Points):
        now, before = (encode(drop_wall_clock(each.values)) for each in (entry, earlier))
        return entry.step == earlier.step and now == before
    return replace(earlier, time=entry.time) == entry


def to_line(entry: Entry) -> bytes:
    return encode({"kind": entry.kind, **asdict(entry)}) + b"\n"


def from_line(line: bytes) -> Entry:
    """Raises StateMismatch if the line is not an entry."""
    try:
        content = json.loads(line)
        kind = _KINDS[content.pop("kind")]
        return kind(**{name: from_json(value) if name in _NUMBERS else value for name, value in content.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateMismatch(f"not an entry of a tracker's outbox: {line[:100]!r}") from error
