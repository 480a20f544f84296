"""Tracker: the contract between dalsegno and one tracker's client.

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

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .entries import Entry, Points, Return, Status, names_in

TIMELINE = "dalsegno/timeline"
"""Series that marks returns: the number of the timeline, from the first point of each on."""


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
    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that determine where its client writes."""
    stores_at_once: bool = True
    """Whether an entry is stored once ``send`` has returned; else once ``close`` has."""
    _arrived: Collection[tuple[int, str]] = ()
    """Step and name of each value that earlier processes have stored, as far as ``open`` finds out."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def send(self, entries: Sequence[Entry]) -> None: ...

    @abstractmethod
    def close(self, status: Status) -> None: ...

    def has(self, entry: Entry) -> bool:
        names = names_in(entry)
        return bool(names) and all((entry.step, name) in self._arrived for name in names)

    def return_to(self, point: Return) -> None:
        """Mark the return; for trackers that cannot forget points."""
        self.send([Points(point.step, point.time, {TIMELINE: point.timeline})])
