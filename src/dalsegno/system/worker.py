"""Worker: runs submitted calls serially on a background thread; submit() waits only if asked to when the queue is full.

An exception in a call, including SystemExit, is logged and counted. The queue is bounded; the thread ends on request
and never keeps the process alive.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dalsegno.errors import ConfigurationError

logger = logging.getLogger("dalsegno")

WhenFull = Literal["drop_oldest", "block"]


@dataclass(slots=True)
class Counts:
    """Outcomes of the calls so far."""

    ran: int = 0
    """Calls that ran, including those that failed."""
    failed: int = 0
    dropped: int = 0
    """Calls that never started: the queue was full, or the timeout expired."""
    first_error: str = ""
    """Of the first call that failed."""

    def __str__(self) -> str:
        return f"{self.ran} calls, {self.failed} failed, {self.dropped} dropped"


class Worker:
    """Runs calls in the order of submission.

    Raises ConfigurationError for a size below 1, or an unknown ``when_full``.

    Args:
        name: used in messages and as the thread's name.
        size: number of calls that may wait.
        when_full: ``"drop_oldest"`` drops the call that has waited longest; ``"block"`` waits for room.
    """

    def __init__(self, name: str, size: int = 1000, when_full: WhenFull = "drop_oldest") -> None:
        if type(size) is not int or size < 1:
            raise ConfigurationError(f"{name}: queue={size!r}; needs an integer of at least 1")
        if when_full not in ("drop_oldest", "block"):
            raise ConfigurationError(f"{name}: when_full={when_full!r}; allowed are 'drop_oldest', 'block'")
        self.name = name
        self.counts = Counts()
        self._by_label: dict[str, Counts] = {}
        self._size = size
        self._when_full = when_full
        self._waiting: deque[tuple[Callable[[], object], str]] = deque()
        self._changed = threading.Condition()
        self._stop_event = threading.Event()  # of the current thread
        self._thread: threading.Thread | None = None

    def do(self, call: Callable[[], object], label: str = "") -> None:
        """Run ``call`` now, on the caller's thread, with the same error handling; KeyboardInterrupt propagates."""
        self._run(call, label, (Exception, SystemExit))

    def submit(self, call: Callable[[], object], label: str = "") -> None:
        """Queue ``call``; an awaitable result is awaited. Call from one thread only.

        ``label``: under which :meth:`report` counts its failures.
        """
        with self._changed:
            if self._when_full == "block":
                self._changed.wait_for(self._has_room)
            elif len(self._waiting) >= self._size:
                self._waiting.popleft()
                self.counts.dropped += 1
            self._waiting.append((call, label))
            self._ensure_thread()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until all calls have run; drop those that have not started by then.

        A running call is not interrupted. The worker accepts calls again afterwards.
        """
        with self._changed:
            if self._waiting:
                self._ensure_thread()
            thread, self._thread = self._thread, None
            self._stop_event.set()
            self._changed.notify_all()
        if thread is None:
            return
        thread.join(timeout)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
            self.counts.dropped += left
        if thread.is_alive():
            logger.warning("%s: not done after %g s; abandoned, %d calls dropped", self.name, timeout, left)

    def _has_room(self) -> bool:
        self._ensure_thread()  # without a thread, no room would ever be made
        return len(self._waiting) < self._size

    def _ensure_thread(self) -> None:
        """Start the thread for the first call, or replace one that died."""
        if self._thread is None:
            self._stop_event = threading.Event()
            self._thread = threading.Thread(
                target=self._run_thread, args=(self._stop_event,), name=self.name, daemon=True
            )
            self._thread.start()

    def _run_thread(self, stop_event: threading.Event) -> None:
        try:
            self._run_calls(stop_event)
        finally:  # an exception in a logging handler also ends the thread
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _run_calls(self, stop_event: threading.Event) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or stop_event.is_set())
                if not self._waiting or stop_event is not self._stop_event:  # waiting calls belong to a newer thread
                    return
                call, label = self._waiting.popleft()
                self._changed.notify_all()
            self._run(call, label, BaseException)

    def _run(
        self, call: Callable[[], object], label: str, survived: type[BaseException] | tuple[type[BaseException], ...]
    ) -> None:
        both = self.counts, self._by_label.setdefault(label, Counts())
        try:
            result: Any = call()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except survived as error:
            for counts in both:
                counts.failed += 1
                counts.first_error = counts.first_error or f"{type(error).__name__}: {error}"
            logger.warning("%s: a call failed; training continues", self.name, exc_info=True)
        finally:
            for counts in both:
                counts.ran += 1

    def report(self) -> None:
        """Log the counts and what failed: as an error, if all calls of a label did, so that nothing came of them."""
        failures = {label: each for label, each in self._by_label.items() if each.failed}
        level = logging.WARNING if failures or self.counts.dropped else logging.INFO
        if any(each.failed == each.ran for each in failures.values()):
            level = logging.ERROR
        details = "".join(
            f"; {label or 'it'} failed in {'all' if each.failed == each.ran else each.failed} of {each.ran} calls, "
            f"first with {each.first_error}"
            for label, each in failures.items()
        )
        logger.log(level, "%s: %s%s", self.name, self.counts, details)


async def _awaited(result: Any) -> None:
    await result
