"""Sender: hands the outbox's entries to a tracker, on a thread of its own that training never waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from .description import without_secrets
from .outbox import Outbox
from .tracker import Entry, Return, Status, TrackedRun, Tracker

logger = logging.getLogger("dalsegno")

_MOST = 500
"""Entries per call of the tracker."""
_INTERVAL_S = 0.2
"""Seconds between two calls of the tracker: frequent ones would take the interpreter lock from training."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a failed call is repeated: doubled after each failure in a row."""


class Sender:
    """Runs from construction to :meth:`close`.

    Args:
        name: of the callback, for messages.
        describe: returns the run's description, within seconds; called on the thread.
    """

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
        for part in _parts([*(each for each in uncertain if not self._tracker.has(each)), *certain]):
            if isinstance(part, Return):
                self._tracker.return_to(part)
            else:
                self._tracker.send(part)
        self._outbox.handed_over(batch, stored=self._tracker.stores_at_once)
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


def _parts(entries: Sequence[Entry]) -> list[list[Entry] | Return]:
    """Split the entries at each return."""
    parts: list[list[Entry] | Return] = []
    for entry in entries:
        if isinstance(entry, Return):
            parts.append(entry)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(entry)
        else:
            parts.append([entry])
    return parts
