"""LiveJob: what the server of a running job shows.

The training thread appends; the server's thread reads. Neither waits for the other for longer than the copy of a list
takes. A source is read from a position on: the run's log on disk if there is one, else this leg's records in memory;
events in memory; legs and commands in the files of the run's directory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dalsegno.errors import CannotSave, StateMismatch
from dalsegno.logs import RunFile
from dalsegno.logs.journal import Journal, JournalEntry
from dalsegno.logs.reader import record_in, strip_line
from dalsegno.logs.values import encode, to_json
from dalsegno.state import TrainerState

from .queue import CommandQueue

CHUNK = 1 << 20
"""Bytes of a log that one answer reads at most; at least one record."""

REMEMBERED = 10_000
"""Records kept in memory if the run writes no log, and events kept in any case."""

MOST_COMMANDS = 1000
"""Commands in the history: the newest."""

PLACE = ("job_id", "status", "timestamp", "logged_at", "global_step", "epoch", "max_steps")
"""Keys of a status that are not logged values."""

_LEG = (
    *("leg", "started", "ended", "from_checkpoint", "first_step", "last_step"),
    *("reason", "by", "why", "cause", "changed"),
)
_COMMAND = ("id", "time", "by", "command", "data", "step", "error")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records after a position: an opaque text without blanks; empty: the beginning."""

    records: Sequence[str]
    """As JSON in ASCII, non-finite numbers as strings."""
    positions: Sequence[str]
    """After each of them."""
    position: str
    """Where the next chunk begins."""
    is_reset: bool
    """The given position is no longer in the log, say because the run resumed from an older checkpoint: these records
    are the log's first."""
    has_more: bool


class LogFile:
    """Records of a log on disk, in either of its formats. It has no state: any number of readers, in any process life.

    A position is the end of a record, its length and its checksum: a log that was rewound or replaced differs there.
    """

    def __init__(self, path: Callable[[], Path | None]) -> None:
        """``path``: the present file, which may change during a leg; None: it does not exist yet."""
        self._path = path

    def after(self, position: str) -> Chunk:
        try:
            descriptor = os.open(self._path() or "", os.O_RDONLY)
        except FileNotFoundError:
            return Chunk([], [], position, is_reset=False, has_more=False)
        try:
            is_known = not position or _is_in(descriptor, position)
            begin = int(position.partition(".")[0]) if is_known and position else 0
            records, positions = _records_after(descriptor, begin)
            has_more = len(records) > 0 and os.fstat(descriptor).st_size > begin + CHUNK
            last = positions[-1] if positions else position if is_known else ""
            return Chunk(records, positions, last, not is_known, has_more)
        finally:
            os.close(descriptor)


class MemoryLog:
    """The last entries of this leg, numbered from 1."""

    def __init__(self) -> None:
        self._leg = f"{time.time_ns():x}"
        self._entries: deque[Mapping[str, Any]] = deque(maxlen=REMEMBERED)
        self._count = 0
        self._lock = threading.Lock()

    def append(self, entry: Mapping[str, Any]) -> None:
        with self._lock:
            self._count += 1
            self._entries.append(entry)

    def after(self, position: str) -> Chunk:
        leg, _, number = position.partition(".")
        with self._lock:
            entries, count = list(self._entries), self._count
        first = count - len(entries)  # number of entries that are no longer kept
        is_known = leg == self._leg and number.isdecimal() and len(number) < 19 and first <= int(number) <= count
        begin = int(number) if is_known else first
        positions = [f"{self._leg}.{each}" for each in range(begin, count + 1)]
        records = [encode(entry).decode() for entry in entries[begin - first :]]
        return Chunk(records, positions[1:], positions[-1], bool(position) and not is_known, False)


class RunHistory:
    """Legs and commands of the run in ``output_dir``, which the live page marks on its curves. On any thread."""

    def __init__(self, output_dir: Path) -> None:
        self._run = RunFile(output_dir)
        self._journal = Journal(output_dir)
        self._read: tuple[int, list[JournalEntry]] = 0, []  # the journal's size, and its commands

    def __call__(self) -> dict[str, Any]:
        """Legs and commands, oldest first; empty where a file is missing or damaged."""
        try:
            run = self._run.load()
        except StateMismatch:  # the next leg replaces it or refuses it
            run = None
        commands = sorted(self._commands(), key=lambda entry: entry.time)[-MOST_COMMANDS:]
        return {
            "legs": [{name: getattr(leg, name) for name in _LEG} for leg in run.legs] if run else [],
            "commands": [{name: getattr(entry, name) for name in _COMMAND} for entry in commands],
        }

    def _commands(self) -> list[JournalEntry]:
        """Read the journal only when it has grown: it warns of each damaged line whenever it is read."""
        try:
            size = self._journal.path.stat().st_size
        except FileNotFoundError:
            return []
        if size != self._read[0]:
            self._read = size, self._journal.read()
        return self._read[1]


class LiveJob:
    """A running job, as its server sees it.

    Args:
        callbacks: returns the list of its callbacks, as JSON values.
        history: returns its legs, checkpoints and commands, as JSON values.
        log_path: the JSON log that the run writes; None: it writes none, so this leg's records are kept in memory.
    """

    def __init__(
        self,
        job_id: str,
        commands: CommandQueue,
        state: TrainerState,
        *,
        callbacks: Callable[[], list[dict[str, Any]]],
        history: Callable[[], dict[str, Any]],
        log_path: Callable[[], Path | None] | None,
    ) -> None:
        self.job_id = job_id
        self.commands = commands
        self.callbacks = callbacks
        self.history = history
        self.events = MemoryLog()
        self._state = state
        self._recent = MemoryLog()
        self.records: MemoryLog | LogFile = self._recent if log_path is None else LogFile(log_path)
        self._logs: dict[str, Any] = {}
        self._logged_at: float | None = None

    def note_log(self, logs: Mapping[str, Any], kind: str) -> None:
        """Take over what has just been logged. On the training thread."""
        now, shown = time.time(), _shown(logs)
        self._logged_at, self._logs = now, {**self._logs, **shown}  # replaced, never changed: the server reads it
        if self.records is self._recent:
            place = {"timestamp": now, "global_step": self._state.global_step, "epoch": self._state.epoch}
            self._recent.append({**place, **({} if kind == "train" else {"kind": kind}), **shown})

    def note_event(self, event: str, **details: Any) -> None:
        """Add an event to the stream. On the training thread."""
        now = {"event": event, "timestamp": time.time(), "global_step": self._state.global_step}
        self.events.append({**now, **_shown(details)})

    def status(self) -> dict[str, Any]:
        """Job, time, step, and the last value of everything that was logged."""
        return {
            **self._logs,
            "job_id": self.job_id,
            "status": "running",
            "timestamp": time.time(),
            "logged_at": self._logged_at,
            "global_step": self._state.global_step,
            "epoch": self._state.epoch,
            "max_steps": self._state.max_steps,
        }


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as JSON; one that JSON cannot represent by its type."""
    shown = {}
    for name, value in values.items():
        try:
            shown[str(name)] = to_json(value, str(name))
        except CannotSave:
            shown[str(name)] = f"<{type(value).__name__}>"
    return shown


def _records_after(descriptor: int, begin: int) -> tuple[list[str], list[str]]:
    """The complete records from ``begin`` on, and the position after each."""
    data = os.pread(descriptor, CHUNK, begin)
    while data and b"\n" not in data.strip() and len(more := os.pread(descriptor, CHUNK, begin + len(data))):
        data += more  # a record longer than a chunk
    records, positions, place = [], [], begin
    for line in data.splitlines(keepends=True):
        text = strip_line(line)
        if text and line.endswith(b"\n"):
            try:
                record = record_in(line)
            except ValueError:  # torn by a kill
                record = None
            if record is not None:
                is_ready = text.isascii() and b"NaN" not in text and b"Infinity" not in text
                records.append((text if is_ready else encode(record)).decode())
                end = place + line.index(text) + len(text)
                positions.append(f"{end}.{len(text)}.{xxhash.xxh3_64_hexdigest(text)}")
        place += len(line)
    return records, positions


def _is_in(descriptor: int, position: str) -> bool:
    """Whether the file has the record that ends at ``position``."""
    end, length, digest = [*position.split("."), "", ""][:3]
    if not (end.isdecimal() and length.isdecimal() and len(end) < 19 and len(length) < 10 and int(end) >= int(length)):
        return False
    if int(end) > os.fstat(descriptor).st_size:
        return False
    text = os.pread(descriptor, int(length), int(end) - int(length))
    return xxhash.xxh3_64_hexdigest(text) == digest
