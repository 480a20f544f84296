"""CommandQueue: commands from their acceptance to their effect.

Any thread submits; the training thread takes what is waiting once all ranks have agreed to, at a step boundary.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dalsegno.args import TrainingArguments
from dalsegno.errors import ConfigurationError, NotFound, NotRunning
from dalsegno.logs.journal import Journal, JournalEntry, abandon

from .commands import Command, is_repeated, parse_command

logger = logging.getLogger("dalsegno")

_MOST_WAITING = 1000
_MOST_TICKETS = 10_000
_LONGEST_NAME = 200  # characters
_RESERVED = ("signal", "clock", "the program", "the loop")  # senders of other requests to stop

Check = Callable[[Command], None]
"""Raises ConfigurationError for a command that this run cannot carry out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command."""

    step: int | None
    """The step at whose end it took effect; None if it did not."""
    error: str | None = None
    """Why it did not take effect."""


class Ticket:
    """Stands for an accepted command."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._outcome: Future[Outcome] = Future()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Wait up to ``timeout`` seconds for the command's effect; None if it has had none by then."""
        try:
            return self._outcome.result(timeout)
        except TimeoutError:
            return None

    def when_resolved(self, call: Callable[[], None]) -> None:
        """Run ``call``, which must be quick, once the outcome is known: on the thread that resolves it, or now."""
        self._outcome.add_done_callback(lambda _: call())

    def _resolve(self, outcome: Outcome) -> None:
        if self._outcome.done():  # an earlier leg left it to this one
            self._outcome = Future()
        self._outcome.set_result(outcome)


class CommandQueue:
    """The commands of one ``Trainer`` or ``Run``, over all legs in this process. Usable from any thread of rank 0.

    Args:
        args: the settings in force.
        check: raises for a command that this run cannot carry out.
    """

    def __init__(
        self, journal: Journal, args: TrainingArguments, check: Check = lambda command: None, *, rank: int = 0
    ) -> None:
        self._journal = journal
        self._args = args
        self._check = check
        self._rank = rank
        self._lock = threading.Lock()  # held while a line is written, so that the file has the queue's order
        self._closed: str | None = "no leg is running"
        self._waiting: list[JournalEntry] = []
        self._tickets: dict[str, Ticket] = {}

    def submit(self, name: str, data: Mapping[str, Any] | None = None, *, by: str) -> Ticket:
        """Accept a command: when this returns, it is on disk in ``control.jsonl``.

        It takes effect on all ranks at the end of one of the next steps. If the process is killed before, the next leg
        carries it out after its first step, unless it only concerned the leg (a stop, a save).

        Args:
            name: of the command, one of ``dalsegno.control.COMMANDS``.
            data: JSON values by field.
            by: who sends it: ``stopped_by`` of a stop, and in ``control.jsonl``.

        Raises:
            UnknownName: for an unknown command or field; the message suggests the nearest.
            ConfigurationError: for a value that cannot work, or a command that this run cannot carry out.
            NotRunning: if no leg is running, or it has decided to end.
            OSError: if the command cannot be written to disk; it has no effect then.
        """
        if self._rank != 0:
            raise ConfigurationError(f"commands are accepted by rank 0; this is rank {self._rank}")
        if not isinstance(by, str) or not by.isprintable() or not 0 < len(by) <= _LONGEST_NAME:
            wanted = f"1 to {_LONGEST_NAME} printable characters"
            raise ConfigurationError(f"by={str(by)[:80]!r}: who sends it; needs {wanted}")
        if by in _RESERVED:
            raise ConfigurationError(f"by={by!r}: who sends it; this name is reserved")
        command = parse_command(name, data or {}, self._args)
        self._check(command)
        with self._lock:
            if self._closed is not None:
                raise NotRunning(f"{command}: {self._closed}")
            if len(self._waiting) >= _MOST_WAITING:
                raise ConfigurationError(f"{command}: {len(self._waiting)} commands are waiting already")
            entry = JournalEntry(uuid.uuid4().hex[:16], time.time(), by, command.name, dict(command.data))
            self._journal.accept(entry)
            self._waiting.append(entry)
            return self._ticket(entry.id)

    def ticket(self, id: str) -> Ticket:
        """The ticket of a command, of this leg or an earlier one of the run. Raises NotFound for an unknown id."""
        try:
            return self._tickets[id]
        except KeyError:
            raise NotFound(f"command {id[:40]!r}: not in {self._journal.path}, or too long ago") from None

    # -- the engine's side, on the training thread of rank 0 ---------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether accepted commands wait for their effect. Called at every step."""
        return bool(self._waiting)

    def read(self, rewind_to: int | None = None) -> list[JournalEntry]:
        """The commands of earlier legs that have taken effect, in this order. Changes nothing. ``rewind_to``: the step
        that the user goes back to, if any: what came later is of an abandoned timeline."""
        with self._lock:
            entries = self._journal.read()
        if rewind_to is not None:
            abandon(entries, rewind_to)
        return [entry for entry in entries if entry.step is not None and entry.error is None]

    def resume(self, rewind_to: int | None = None, overridden: Mapping[str, Sequence[str]] | None = None) -> None:
        """Begin a leg. Commands that were accepted and had no effect are waiting again; stops and saves are dropped.
        ``rewind_to``: as for :meth:`read`; ``overridden``: by id, the settings of commands that no longer apply."""
        if rewind_to is not None:
            self._journal.rewind(rewind_to)
        entries = self._journal.read()
        pending = [entry for entry in entries if entry.is_pending]
        lost = [entry for entry in pending if not is_repeated(entry)]
        for entry in lost:
            entry.error = "the leg was killed before it took effect"
        self._journal.drop({entry.id: str(entry.error) for entry in lost})
        self._journal.override(overridden or {})
        with self._lock:
            self._waiting = [entry for entry in pending if entry.is_pending]
            for entry in entries[-_MOST_TICKETS:]:
                ticket = self._ticket(entry.id)
                if not entry.is_pending:
                    ticket._resolve(Outcome(None if entry.error else entry.step, entry.error))

    def open(self) -> None:
        """Accept commands: a leg begins."""
        with self._lock:
            self._closed = None

    def waiting(self) -> Sequence[JournalEntry]:
        """The accepted commands that have had no effect, in the order of acceptance."""
        with self._lock:
            return [*self._waiting]

    def record(self, acting: Sequence[JournalEntry], step: int) -> list[JournalEntry]:
        """Write to disk that commands take effect at ``step``. Returns those that may: on a full disk, only those that
        are never repeated; the others stay waiting, and the next call tries again."""
        try:
            with self._lock:
                self._journal.act(acting, step)
        except OSError as error:
            logger.warning("%s could not be written: %s; commands wait until it can", self._journal.path, error)
            acting = [entry for entry in acting if not is_repeated(entry)]
        for entry in acting:
            entry.step = step
        self._remove(acting)
        return [*acting]

    def resolve(self, acted: Sequence[JournalEntry]) -> None:
        """Answer those who wait for commands that have taken effect."""
        for entry in acted:
            self._tickets[entry.id]._resolve(Outcome(entry.step))

    def refuse(self, errors: Mapping[str, str]) -> None:
        """Drop waiting commands that cannot be carried out, by id with the reason."""
        with self._tolerant():
            self._journal.drop(errors)
        self._remove([entry for entry in self.waiting() if entry.id in errors])
        for id_, reason in errors.items():
            self._tickets[id_]._resolve(Outcome(None, reason))

    def override(self, settings: Mapping[str, Sequence[str]]) -> None:
        """Record, by id, the settings of commands that no longer apply, since a later command has set them."""
        with self._tolerant():
            self._journal.override(settings)

    def close(self, step: int) -> None:
        """Accept no more commands: the leg has decided to end after ``step``. Answers those who still wait."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = f"the leg ends after step {step}, and takes no more commands"
            left, self._waiting = self._waiting, []
        errors = {entry.id: f"the leg ended after step {step} first" for entry in left}
        for entry in left:
            if is_repeated(entry):
                errors[entry.id] += "; the next leg carries it out at the end of its first step"
        with self._tolerant():
            self._journal.drop({entry.id: errors[entry.id] for entry in left if not is_repeated(entry)})
        for entry in left:
            self._tickets[entry.id]._resolve(Outcome(None, errors[entry.id]))

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Hold the lock while a line is written; log it if the disk refuses the line."""
        try:
            with self._lock:
                yield
        except OSError as error:
            logger.warning("%s could not be written: %s", self._journal.path, error)

    def _remove(self, entries: Sequence[JournalEntry]) -> None:
        ids = {entry.id for entry in entries}
        with self._lock:
            self._waiting = [entry for entry in self._waiting if entry.id not in ids]

    def _ticket(self, id: str) -> Ticket:
        """The ticket of this id, new if there is none. The oldest ones are forgotten once there are too many."""
        if len(self._tickets) >= _MOST_TICKETS:
            oldest = next((each for each in self._tickets.values() if each._outcome.done()), None)
            if oldest is not None:
                del self._tickets[oldest.id]
        return self._tickets.setdefault(id, Ticket(id))
