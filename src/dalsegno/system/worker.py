"""Worker: calls done one after the other on a thread of their own, which whoever asks for them never feels.

What a call raises, SystemExit too, is logged and counted. The queue is bounded; the thread ends when it is told to, and
never keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
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
    """What has become of the calls so far."""

    ran: int = 0
    """Done, those that failed too."""
    failed: int = 0
    dropped: int = 0
    """Never begun: the queue was full, or time was up."""

    def __str__(self) -> str:
        return f"{self.ran} calls, {self.failed} failed, {self.dropped} dropped"


class Worker:
    """Does what it is given, in order.

    Args:
        name: for messages, and of the thread.
        size: calls that may wait.
        when_full: ``"drop_oldest"`` forgets the one that waits longest; ``"block"`` waits until there is room.

    Raises:
        ConfigurationError: for a size below 1, or another word for ``when_full``.
    """

    def __init__(self, name: str, size: int = 1000, when_full: WhenFull = "drop_oldest") -> None:
        if type(size) is not int or size < 1:
            raise ConfigurationError(f"{name}: queue={size!r}; needs a whole number of at least 1")
        if when_full not in ("drop_oldest", "block"):
            raise ConfigurationError(f"{name}: when_full={when_full!r}; allowed are 'drop_oldest', 'block'")
        self.name = name
        self.counts = Counts()
        self._size = size
        self._when_full = when_full
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._told_to_end = threading.Event()  # of the present thread
        self._thread: threading.Thread | None = None

    def do(self, call: Callable[[], object]) -> None:
        """Do it here and now, on the caller's thread, and as careful of what it raises; but Ctrl-C is the caller's."""
        self._do(call, (Exception, SystemExit))

    def submit(self, call: Callable[[], object]) -> None:
        """Let ``call`` be done; what it returns is awaited if it can be. From one thread only."""
        with self._changed:
            if self._when_full == "block":
                self._changed.wait_for(self._has_room)
            elif len(self._waiting) >= self._size:
                self._waiting.popleft()
                self._drop(1)
            self._waiting.append(call)
            self._see_to_thread()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Wait until everything is done, ``timeout`` seconds at most; what is not begun by then is dropped.

        A call that is still going on is left alone. After this the worker may be given calls again.
        """
        with self._changed:
            if self._waiting:
                self._see_to_thread()
            thread, self._thread = self._thread, None
            self._told_to_end.set()
            self._changed.notify_all()
        if thread is None:
            return
        thread.join(timeout)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
            self._drop(left)
        if thread.is_alive():
            logger.warning("%s: not done after %g s; left behind, with %d calls dropped", self.name, timeout, left)

    def _drop(self, calls: int) -> None:
        self.counts.dropped += calls

    def _has_room(self) -> bool:
        self._see_to_thread()  # else nobody would ever make room
        return len(self._waiting) < self._size

    def _see_to_thread(self) -> None:
        """Let there be one: for the first call, or in place of one that has died."""
        if self._thread is None:
            self._told_to_end = threading.Event()
            self._thread = threading.Thread(target=self._live, args=(self._told_to_end,), name=self.name, daemon=True)
            self._thread.start()

    def _live(self, told_to_end: threading.Event) -> None:
        try:
            self._work(told_to_end)
        finally:  # what a logging handler raises ends it, too
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _work(self, told_to_end: threading.Event) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or told_to_end.is_set())
                if not self._waiting or told_to_end is not self._told_to_end:  # what waits now is for another thread
                    return
                call = self._waiting.popleft()
                self._changed.notify_all()
            self._do(call, BaseException)

    def _do(self, call: Callable[[], object], survived: type[BaseException] | tuple[type[BaseException], ...]) -> None:
        try:
            _finish(call())
        except survived:
            self.counts.failed += 1
            logger.warning("%s: a call failed; the training goes on", self.name, exc_info=True)
        finally:
            self.counts.ran += 1


def lower_thread_priority() -> None:
    """Give the calling thread, and those that it starts, the lowest priority: training comes first."""
    if sys.platform == "linux":  # where a priority is a thread's, not the whole process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _finish(result: Any) -> None:
    """Await what an async function has returned; nothing else."""
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Any) -> None:
    await result
