"""TrackerLogger: base class of the loggers that write to an experiment tracker; its outbox, and what sends that.

The outbox is the file that contains all that a tracker receives, sent or not; it is never cut back by a resume alone.

After a resume the run replays what it did after its checkpoint. The entries of the replay are compared with those that
follow the checkpoint's position in the file:

- An equal entry is not added again, so that the tracker receives it once, however often the run is killed.
- The first that differs begins a new timeline: the rest of the file moves to ``rewound/`` beside it. If the tracker has
  received some of that rest, a :class:`Return` entry precedes the new timeline.

Cards depend on when a background save ends: they are compared by their step, wherever they are.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict, cast

from dalsegno.callbacks.argument_checks import number
from dalsegno.callbacks.loggers.json_logger import warn_not_writing
from dalsegno.callbacks.loggers.tensorboard import RewoundWriter
from dalsegno.callbacks.trackers.tracker import (
    Card,
    Entry,
    Histogram,
    Points,
    Return,
    Status,
    Text,
    TrackedRun,
    Tracker,
    code_versions,
    from_line,
    model_card,
    public,
    replays,
    to_line,
    without_secrets,
)
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.events import contexts
from dalsegno.logs import RunFile
from dalsegno.logs.rewind import archive_tail, free_path
from dalsegno.logs.values import to_json
from dalsegno.policies.triggers import SaveTrigger, save_trigger
from dalsegno.stateful import schema
from dalsegno.system import filesystem
from dalsegno.system.imports import require_extra

logger = logging.getLogger("dalsegno")


OUTBOXES = "trackers"
"""Directory in ``logs``, with a directory for each logger's key."""
OUTBOX = "outbox.jsonl"
_PIECE_BYTES = 1 << 18


class Batch(NamedTuple):
    entries: list[Entry]
    uncertain: int
    """Number of the first entries that an earlier process may already have sent."""
    begin: int
    end: int


class Outbox:
    """Written by the training thread, read by the sender's. The directory has ``outbox.jsonl`` and ``sent.json``."""

    def __init__(self, directory: Path) -> None:
        filesystem.make_directory(directory)
        self.directory = directory
        self._path = directory / OUTBOX
        self._cursor_path = directory / "sent.json"
        self._changed = threading.Condition()
        self._descriptor = filesystem.open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._is_closed = False
        self._end = self._whole_lines()
        self._front = 0  # up to which the entries belong to this timeline
        self._read_cursor()
        self._uncertain = self._handed
        """Up to which an earlier process has handed entries to a tracker that may have lost them."""
        self._begin = self._stored
        """Of the next entry that is not handed over by this process."""
        self._claimed = 0  # up to which a batch that is claimed belongs to this timeline
        self.replay_from(self._end)

    def _read_cursor(self) -> None:
        """Restore how far entries were handed to the tracker, how far it is known to have stored them."""
        self._stored, self._handed, self._timeline = 0, 0, 1
        try:
            content = json.loads(self._cursor_path.read_bytes())
            self._stored, self._handed, self._timeline = (
                int(content[each]) for each in ("stored", "handed", "timeline")
            )
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged; the tracker gets all entries again", self._cursor_path)
        self._stored, self._handed = min(self._stored, self._end), min(self._handed, self._end)

    def _write_cursor(self) -> None:
        content = {"stored": self._stored, "handed": self._handed, "timeline": self._timeline}
        part = self._cursor_path.with_suffix(".partial")
        part.write_text(json.dumps(content))
        part.replace(self._cursor_path)  # atomic; not fsynced, since a machine's crash only sends a few entries again

    # -- training thread --------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Length up to the newest entry of this timeline, for the checkpoint."""
        return self._front

    def replay_from(self, position: int) -> None:
        """Expect the entries after ``position`` once more: the length of the file at the checkpoint from which the run
        resumes; 0 if it starts from scratch."""
        if position > self._end:
            missing = position - self._end
            logger.warning("%s is shorter than its checkpoint records: %d bytes are missing", self._path, missing)
            position = self._end
        self._last_step = self._step_before(position)
        self._cards = self._find_cards()
        entries = self._read(position, self._end, self._descriptor)
        self._replay = (each for each in entries if not isinstance(each[1], (Card, Return)))
        self._expect_next()

    def add(self, entry: Entry) -> None:
        """Append ``entry``, unless it is the next one of the replay. After an OSError the file is as before."""
        if isinstance(entry, Card):
            if entry.step not in self._cards:
                self._append(entry)
                self._cards.add(entry.step)
            return
        if self._next is not None and replays(entry, self._next[1]):
            self._expect_next()
        else:
            if self._next is not None:
                self._begin_timeline(self._next[0])
            self._append(entry)
        self._last_step = entry.step

    def make_durable(self) -> None:
        """Fsync the file: the position in a checkpoint must be on disk before the checkpoint is published."""
        filesystem.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file. What the sender's thread still does, because its tracker has not answered, has no effect."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        os.close(self._descriptor)

    def _expect_next(self) -> None:
        self._next = next(self._replay, None)
        with self._changed:
            self._front = self._end if self._next is None else self._next[0]
            self._changed.notify_all()

    def _begin_timeline(self, begin: int) -> None:
        """Archive what follows ``begin``, and mark the return if the tracker has received some of it."""
        target = free_path(self.directory, self._path.name)
        archive_tail(self._descriptor, begin, target)
        with self._changed:
            was_handed = self._handed > begin
            filesystem.truncate(self._descriptor, begin, self._path)
            self._end = self._front = begin
            self._stored, self._handed = min(self._stored, begin), min(self._handed, begin)
            self._begin, self._uncertain = min(self._begin, begin), min(self._uncertain, begin)
            self._claimed = min(self._claimed, begin)
            self._timeline += was_handed
            self._write_cursor()
        self._next, self._cards = None, self._find_cards()
        step = self._last_step
        logger.info("%s: entries after step %d differ from before; moved those to %s", self._path, step, target)
        if was_handed:
            self._append(Return(step, time.time(), self._timeline))

    def _append(self, entry: Entry) -> None:
        line = to_line(entry)
        try:
            filesystem.write_all(self._descriptor, line, self._path)
        except OSError:
            filesystem.truncate(self._descriptor, self._end, self._path)
            raise
        with self._changed:
            self._end += len(line)
            if self._next is None:
                self._front = self._end
            self._changed.notify_all()

    # -- sender's thread --------------------------------------------------------------------------------------------

    def claim(self, most: int) -> Batch:
        """Return up to ``most`` entries that this process has not handed over, and mark them as handed over."""
        with self._changed:
            begin, end = self._begin, self._front
            if self._is_closed:
                return Batch([], 0, begin, begin)
            self._claimed = front = end
        entries: list[Entry] = []
        uncertain = 0
        with self._path.open("rb") as file:  # its own: the training thread may close the other one meanwhile
            for position, entry in self._read(begin, end, file.fileno()):
                if len(entries) == most:
                    end = position
                    break
                entries.append(entry)
                uncertain += position < self._uncertain
        with self._changed:
            if self._is_closed or self._claimed != front:  # a new timeline has begun meanwhile
                return Batch([], 0, begin, begin)
            if entries and end > self._handed:
                self._handed = end
                self._write_cursor()
        return Batch(entries, uncertain, begin, end)

    def handed_over(self, batch: Batch) -> None:
        """Continue after ``batch``, or after what a timeline that has begun meanwhile has left of it."""
        with self._changed:
            if not self._is_closed:
                self._begin = min(batch.end, self._claimed)

    def all_stored(self) -> None:
        """The tracker has stored everything that was handed over."""
        with self._changed:
            if not self._is_closed:
                self._stored = self._begin
                self._write_cursor()

    def doubt(self) -> None:
        """A call of the tracker has failed: the entries of the batch may have arrived."""
        with self._changed:
            self._uncertain = self._handed

    def waiting(self) -> int:
        """Number of entries that are not handed over."""
        with self._changed:
            begin, end = self._begin, self._front
        return sum(1 for _ in self._lines(begin, end, self._descriptor))

    def wait(self, unless: Callable[[], bool]) -> None:
        """Wait for an entry to hand over, or until ``unless()`` is true: whoever makes it true calls :meth:`wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._begin < self._front or self._is_closed or unless())

    def wake(self) -> None:
        """Called when the condition of a :meth:`wait` may have become true."""
        with self._changed:
            self._changed.notify_all()

    # -- the file ---------------------------------------------------------------------------------------------------

    def _whole_lines(self) -> int:
        """Return the length of the file without a line that a kill has torn, which is removed."""
        size = end = os.fstat(self._descriptor).st_size
        while end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            filesystem.truncate(self._descriptor, end, self._path)
        return end

    def _lines(self, begin: int, end: int, descriptor: int) -> Iterator[tuple[int, bytes]]:
        """Yield the position of each line, and the line."""
        rest, position = b"", begin
        while begin < end:
            piece = os.pread(descriptor, min(_PIECE_BYTES, end - begin), begin)
            if not piece:
                return
            begin += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield position, line
                position += len(line) + 1

    def _read(self, begin: int, end: int, descriptor: int) -> Iterator[tuple[int, Entry]]:
        for position, line in self._lines(begin, end, descriptor):
            try:
                yield position, from_line(line)
            except StateMismatch as error:
                logger.warning("%s: a line is skipped: %s", self._path, error)

    def _find_cards(self) -> set[int]:
        mark = to_line(Card(0, 0.0, "", ""))[:15]
        lines = (line for _, line in self._lines(0, self._end, self._descriptor) if line.startswith(mark))
        return {from_line(line).step for line in lines}

    def _step_before(self, position: int) -> int:
        """Return the step of the last entry before ``position``; 0 if there is none."""
        begin, last = position, b""
        while begin and b"\n" not in last[:-1]:
            begin = max(0, begin - _PIECE_BYTES)
            last = os.pread(self._descriptor, position - begin, begin)
        return from_line(last[:-1].rpartition(b"\n")[2]).step if last else 0


_MOST = 500
"""Entries per call of the tracker."""
_INTERVAL_S = 0.2
"""Seconds between two calls of the tracker: frequent ones would take the interpreter lock from training."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a failed call is repeated: doubled after each failure in a row."""


class Sender:
    """Runs from construction to :meth:`close`. ``describe`` takes seconds, so the thread calls it."""

    def __init__(self, name: str, tracker: Tracker, outbox: Outbox, describe: Callable[[], TrackedRun]) -> None:
        self._name, self._tracker, self._outbox, self._describe = name, tracker, outbox, describe
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._status: Status = "finished"
        self._failures = 0  # in a row
        self._is_open = False
        self._thread = threading.Thread(target=self._run, name=f"dalsegno-{name}", daemon=True)
        self._thread.start()

    def close(self, status: Status, timeout: float) -> None:
        """Hand over what waits, and close the tracker. After ``timeout`` seconds the thread is abandoned: it ends with
        the call in which the tracker's client waits."""
        self._status = status
        self._closing.set()
        self._outbox.wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._abandoned.set()
            reason = f"the tracker has not answered for {timeout:g} s"
        elif self._outbox.waiting():
            reason = "the sender's thread has failed"
        else:
            return
        logger.warning(
            "%s: %s; %d entries wait in %s, and the next leg sends them",
            *(self._name, reason, self._outbox.waiting(), self._outbox.directory),
        )

    def _run(self) -> None:  # at normal priority: a low one would hold the interpreter lock for longer
        run = self._describe()
        while not self._abandoned.is_set():
            try:
                if not self._is_open:
                    self._tracker.open(run)
                    self._is_open = True
                elif self._send_batch():
                    self._closing.wait(_INTERVAL_S)
                elif not self._closing.is_set():
                    self._outbox.wait(unless=self._closing.is_set)
                else:
                    self._tracker.close(self._status)
                    self._outbox.all_stored()
                    return
            except (Exception, SystemExit) as error:  # a client's SystemExit must not end the thread either
                self._note_failure(error)

    def _send_batch(self) -> bool:
        """Hand over the next entries; False if nothing waits. All lines that wait may be damaged: they are skipped."""
        batch = self._outbox.claim(_MOST)
        if batch.end <= batch.begin:
            return False
        uncertain, certain = batch.entries[: batch.uncertain], batch.entries[batch.uncertain :]
        entries = [*(each for each in uncertain if not self._tracker.has(each)), *certain]
        for is_return, some in groupby(entries, lambda each: isinstance(each, Return)):
            if is_return:
                for point in some:
                    self._tracker.return_to(cast(Return, point))
            else:
                self._tracker.send(list(some))
        self._outbox.handed_over(batch)
        if self._tracker.stores_at_once:
            self._outbox.all_stored()
        if self._failures:
            logger.info("%s: the tracker answers again", self._name)
            self._failures = 0
        return True

    def _note_failure(self, error: BaseException) -> None:
        """Wait before the next try; it begins with a new connection."""
        self._is_open = False
        if not self._failures:
            reason = without_secrets(f"{type(error).__name__}: {error}")
            logger.warning(
                "%s: %s; entries wait in %s until the tracker answers", self._name, reason, self._outbox.directory
            )
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_S)
        self._failures += 1
        self._outbox.doubt()
        if self._closing.is_set():
            self._abandoned.wait(min(pause, FIRST_PAUSE_S))
        else:
            self._closing.wait(pause)


# --- the logger -----------------------------------------------------------------------------------------------------

_STATUS: dict[str, Status] = {"exception": "failed", "aborted": "failed", "interrupted": "killed"}
"""By the reason for which a leg ended, if it is not "finished"."""


class TrackerState(TypedDict):
    run_id: str
    position: schema.Count


class TrackerLogger(RewoundWriter):
    """Writes the numbers of each record, model cards, texts and histograms to one run of a tracker.

    A record is first appended to ``logs/trackers/<key>/outbox.jsonl``; a thread of its own hands it to the tracker's
    client. So training does not wait for the network, and what the tracker does not accept now is sent later, also by a
    later leg. The tracker's run is the same over all legs. A resumed run does not send repeated records again; if they
    differ from those of the killed leg, the tracker's run is rewound, or the step at which they differ is marked.

    It may be the ``summary_writer`` of other callbacks: ``TextgenCallback(summary_writer=tracker)``.
    """

    package: ClassVar[str]
    """Of the client; dalsegno's extra of the same name installs it."""

    ranks = "zero"
    state_compared = False  # the length of the outbox, which only rank 0 knows
    state_varies = ("run_id", "position")
    state_schema: Any = TrackerState | None

    def __init__(
        self, new_tracker: Callable[[], Tracker], *, cards: SaveTrigger | str | None, wait_s: float, name: str | None
    ) -> None:
        """``new_tracker`` is called for each call of ``train()``; the other arguments are those of the subclasses."""
        self.name = name
        self._new_tracker = new_tracker
        try:
            self._cards = None if cards is None else save_trigger(cards)
        except ConfigurationError as error:
            raise ConfigurationError(f"{type(self).__name__}: cards={cards!r}: {error}") from None
        self._wait_s = number(type(self).__name__, "wait_s", wait_s, least=0)
        require_extra(self.package, self.package, type(self).__name__)
        self._outbox: Outbox | None = None  # on rank 0, while training runs
        self._sender: Sender | None = None
        self._saved: TrackerState | None = None

    # -- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        directory = ctx.args.directory / "logs"
        if self._saved is None:
            run = RunFile(ctx.args.directory).load()
            run_id = run.run_id if run is not None else f"{time.time_ns():016x}"
            self._saved = {"run_id": run_id, "position": 0}
        run_id = self._saved["run_id"]
        outbox = self._outbox = Outbox(directory / OUTBOXES / self.key)
        outbox.replay_from(self._saved["position"])
        settings = public(to_json(ctx.args.to_dict()))
        name = ctx.args.run_name or ctx.args.directory.name

        def describe() -> TrackedRun:
            return TrackedRun(run_id, name, directory, settings, code_versions())

        self._sender = Sender(self.key, self._new_tracker(), outbox, describe)

    def on_log(self, ctx: contexts.LogContext) -> None:
        values = {
            name: float(value) if isinstance(value, float) else int(value)
            for name, value in ctx.logs.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        if values:
            self._add(Points(ctx.state.global_step, time.time(), values))

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if self._cards is not None and (self._cards.at_step(ctx.step) or (self._cards.on_best and ctx.is_best)):
            self._add(Card(ctx.step, time.time(), ctx.path.name, model_card(ctx)))

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        outbox, sender, self._outbox, self._sender = self._outbox, self._sender, None, None
        if outbox is None or sender is None or self._saved is None:
            return
        self._saved = {**self._saved, "position": outbox.position}
        outbox.make_durable()
        sender.close(_STATUS.get(ctx.reason, "finished"), self._wait_s)
        outbox.close()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> TrackerState | None:
        if self._saved is None or self._outbox is None:
            return self._saved
        return {**self._saved, "position": self._outbox.position}

    def load_state_dict(self, state: Any) -> None:
        """Expect the entries after the checkpoint again: at once in training (rollback), else when it begins."""
        self._saved = state
        if self._outbox is not None:
            self._outbox.replay_from(0 if state is None else state["position"])

    def make_durable(self) -> None:
        """Fsync the outbox: its length in a checkpoint must be on disk before the checkpoint is published."""
        if self._outbox is not None:
            self._outbox.make_durable()

    # -- as a summary writer ----------------------------------------------------------------------------------------

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Send one point."""
        self._add(Points(global_step, time.time(), {tag: float(scalar_value)}))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """Send a text in Markdown."""
        self._add(Text(global_step, time.time(), tag, text_string))

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: Sequence[float],
        bucket_counts: Sequence[float],
        global_step: int,
    ) -> None:
        """Send a histogram: of each bucket the right edge and the count, ascending from ``min``. ``max``, ``num``,
        ``sum`` and ``sum_squares``, which TensorBoard stores beside them, are not sent."""
        edges = [float(min), *map(float, bucket_limits)]
        self._add(Histogram(global_step, time.time(), tag, edges, [*map(float, bucket_counts)]))

    def _add(self, entry: Entry) -> None:
        if collectives.rank() != 0:
            return
        if self._outbox is None:
            warn_not_writing(self)
            return
        try:
            self._outbox.add(entry)
        except OSError as error:
            logger.error("%s: the entry of step %d is lost (%s); training continues", self.key, entry.step, error)
