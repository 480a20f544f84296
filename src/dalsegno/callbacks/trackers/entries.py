"""Entries: what a tracker receives, each one line of JSON in the outbox."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from dalsegno.errors import StateMismatch
from dalsegno.logs.values import encode, from_json
from dalsegno.logs.wall_clock import drop_wall_clock


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


Status = Literal["finished", "failed", "killed"]

_KINDS: dict[str, type[Entry]] = {each.kind: each for each in (Points, Text, Histogram, Card, Return)}
_NUMBERS = ("values", "edges", "counts")
"""Fields with floats that JSON has no numbers for."""


def replays(entry: Entry, earlier: Entry) -> bool:
    """Return whether the two contain the same, except for wall-clock fields."""
    if isinstance(entry, Points) and isinstance(earlier, Points):
        now, before = (encode(drop_wall_clock(each.values)) for each in (entry, earlier))
        return entry.step == earlier.step and now == before
    return replace(earlier, time=entry.time) == entry


def names_in(entry: Entry) -> Collection[str]:
    """Return the names of an entry's values at its step; a card has none."""
    if isinstance(entry, Points):
        return entry.values.keys()
    return (entry.tag,) if isinstance(entry, (Text, Histogram)) else ()


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


def numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are numbers, without the step; a list or a text is not a point."""
    return {
        name: float(value) if isinstance(value, float) else int(value)
        for name, value in logs.items()
        if isinstance(value, (int, float)) and name != "step"
    }
