"""Journal: the events of a DiLoCo run on disk, after its newest checkpoint and a few before it.

Nothing that depends on an event may leave the server before it is committed. After a kill or a power cut, the committed
events lead to a state beyond which no worker is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import NotRunning, StateMismatch
from dalsegno.logs.line_file import LineFile
from dalsegno.logs.values import decode
from dalsegno.system import filesystem

from .rounds import Event, event_from_json

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    batch: int
    """Number of the first event that was committed with this one."""
    event: Event


class Journal:
    """The events at ``path``, with their numbers. :meth:`record` is called on one thread at a time, all others on
    any."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, _parse)
        self._recorded: list[tuple[int, Event, Callable[[], object] | None]] = []  # but not committed
        self._is_closed = False
        self._turn = threading.Lock()  # of the threads that change the file

    def record(self, event: Event, number: int, make_durable: Callable[[], object] | None = None) -> None:
        """Take the next event. ``make_durable``: called before the event is written; what the event refers to is on
        disk when it returns."""
        self._recorded.append((number, event, make_durable))

    def commit(self) -> None:
        """Write all events that are recorded. They are on disk when this returns, whichever thread has written them.

        Raises OSError if the disk refuses it: the next commit tries again. Raises NotDurable, at each later commit too,
        if the disk has lost what an event refers to, or may lose this file. Raises NotRunning if the journal is closed.
        """
        with self._turn:
            recorded = self._recorded[:]
            if recorded and self._is_closed:
                raise NotRunning("the server has stopped; start it again, it continues")
            for _, _, make_durable in recorded:
                if make_durable is not None:
                    make_durable()
            if recorded:
                self._file.append(_lines(recorded[0][0], (event for _, event, _ in recorded)))
            del self._recorded[: len(recorded)]

    def recover(self, number: int) -> list[Event]:
        """As :meth:`after`, at the start of a server: remove before what a power cut has left of the last commit."""
        with self._turn:
            self._remove_torn_batch(number)
            return self.after(number)

    def after(self, number: int) -> list[Event]:
        """The committed events after this number. Raises StateMismatch if the journal is damaged, has no event that
        follows on this number, or two events of one number."""
        events = []
        expected = number + 1
        seen: dict[int, Event] = {}  # the same batch is here twice if its first write could not be undone
        for line in self._file.read(strict=True):
            if seen.setdefault(line.number, line.event) != line.event:
                raise StateMismatch(f"{self._file.path}: event {line.number} is there twice, with different content")
            if line.number < expected:
                continue
            if line.number > expected:
                raise StateMismatch(f"{self._file.path}: event {expected} is missing")
            expected += 1
            events.append(line.event)
        return events

    def _remove_torn_batch(self, number: int) -> None:
        """Remove the end of the file from its first hole on, if all of it can be of one batch, of which nothing was
        acknowledged.

        The pages of an append reach the disk in any order: after a power cut, one that did not is a hole, of NULs, also
        before others that did. No line has a NUL. What is on disk from an earlier commit is not affected.
        """
        path = self._file.path
        data = path.read_bytes() if path.exists() else b""
        if b"\0" not in data:
            return
        begin = data.rfind(b"\n", 0, data.index(b"\0")) + 1
        last = max((line.number for line in _readable(data[:begin])), default=number)
        batches = {line.batch for line in _readable(data[begin:])}
        if len(batches) > 1 or any(batch > last + 1 for batch in batches):
            return  # a damaged event was followed by a later commit
        removed = filesystem.numbered(path.parent, f"{path.name}.torn")
        filesystem.replace_durably(removed, data[begin:])
        filesystem.replace_durably(path, data[:begin])
        logger.warning(
            "%s: what a power cut left of the last commit, which acknowledged nothing, is moved to %s",
            path,
            removed.name,
        )

    def shorten(self, number: int) -> None:
        """Drop the events up to this number, which are committed. Raises OSError if the disk refuses it, and nothing is
        dropped; NotDurable, as each later commit does, if the disk may lose this file."""
        with self._turn:
            self._file.replace(_lines(number + 1, self.after(number)))

    def clear(self) -> None:
        with self._turn:
            self._file.replace(())

    def close(self) -> None:
        """Write no more: from now on the file may be another server's. What is not committed is lost."""
        with self._turn:
            self._is_closed = True


def _lines(first: int, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Lines that are written together."""
    for number, event in enumerate(events, first):
        yield {"event": number, "batch": first, **asdict(event)}


def _parse(text: bytes) -> _Line:
    content = decode(text)
    if not isinstance(content, dict) or any(type(content.get(name)) is not int for name in ("event", "batch")):
        raise ValueError(f"not an event: {text[:80]!r}")
    return _Line(content.pop("event"), content.pop("batch"), event_from_json(content))


def _readable(data: bytes) -> Iterator[_Line]:
    for text in data.split(b"\n"):
        with suppress(ValueError, StateMismatch):
            yield _parse(text)
