"""Journal: the events of a DiLoCo run, which take effect at once, and are on disk once they are committed.

So an outer step waits neither for the disk nor for the journal: the submissions reach the disk meanwhile. Nothing that
depends on an event may leave the server before it is committed. After a kill or a power cut, the committed events lead
to a state beyond which no worker is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import NotRunning, StateMismatch
from dalsegno.logs.line_file import LineFile
from dalsegno.logs.values import decode

from .state import Event, event_from_json, event_to_json


@dataclass(frozen=True, slots=True)
class _Recorded:
    number: int
    event: Event
    make_durable: Callable[[], object]


class Journal:
    """The events at ``path``, with their numbers. :meth:`record` and :meth:`shorten` are called in turn, :meth:`commit`
    on any thread."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, _parse)
        self._recorded: list[_Recorded] = []  # but not committed
        self._is_closed = False
        self._turn = threading.Lock()  # of the threads that change the file

    def record(self, event: Event, number: int, make_durable: Callable[[], object] = int) -> None:
        """Take the next event.

        Args:
            event: that takes effect now.
            number: of the event: one more than that of the last one.
            make_durable: called before the event is written; what the event refers to is on disk when it returns.
        """
        self._recorded.append(_Recorded(number, event, make_durable))

    def commit(self) -> None:
        """Write all events that are recorded. They are on disk when this returns, whichever thread has written them.

        Raises:
            OSError: if the disk refuses it; the next commit tries again.
            NotRunning: if the journal was closed before.
        """
        with self._turn:
            recorded = self._recorded[:]
            if recorded and self._is_closed:
                raise NotRunning("the server has stopped; start it again, it continues")
            for each in recorded:
                each.make_durable()
            self._file.append(_line(each.number, each.event) for each in recorded)
            del self._recorded[: len(recorded)]

    def after(self, number: int) -> list[Event]:
        """The committed events after this number.

        Raises:
            StateMismatch: if the journal is damaged, or has no event that follows on this number.
        """
        events = []
        expected = number + 1
        for found, event in self._file.read(strict=True):
            if found < expected:
                continue
            if found > expected:
                raise StateMismatch(f"{self._file.path}: event {expected} is missing")
            expected += 1
            events.append(event)
        return events

    def shorten(self, number: int) -> list[Event]:
        """Drop the events up to this number, which are committed, and return those after it, committed or not."""
        with self._turn:
            committed = self.after(number)
            self._file.replace(_line(each, event) for each, event in enumerate(committed, number + 1))
            return [*committed, *(each.event for each in self._recorded)]

    def clear(self) -> None:
        """Drop all events."""
        with self._turn:
            self._file.replace(())

    def close(self) -> None:
        """Write no more: from now on the file may be another server's. What is not committed is lost."""
        with self._turn:
            self._is_closed = True


def _line(number: int, event: Event) -> dict[str, Any]:
    return {"event": number, **event_to_json(event)}


def _parse(text: bytes) -> tuple[int, Event]:
    content = decode(text)
    if not isinstance(content, dict) or type(content.get("event")) is not int:
        raise ValueError(f"not an event: {text[:80]!r}")
    return content.pop("event"), event_from_json(content)
