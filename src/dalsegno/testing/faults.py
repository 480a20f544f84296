"""FaultPlan: a process sends itself a signal at a given point, by default SIGKILL, as an out-of-memory killer would."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.registration import register_global_callback
from dalsegno.events.table import Event
from dalsegno.system import filesystem


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Where to kill a process: exactly one of ``event``, ``operation`` and ``seconds``.

    Args:
        event: kill when this event fires for the ``count``-th time.
        operation: kill before the ``count``-th file operation of this kind (``write``, ``fsync``, ``rename``,
            ``mkdir``, ``link``, ``unlink``, ``truncate``, or ``any``) on a path that contains ``path``.
        seconds: kill this long after the plan is armed.
        sends: the signal; SIGTERM, for example, as a cluster sends before it takes a machine back.

    Raises:
        ConfigurationError: for none or several of the three, or a count below 1.
    """

    event: Event | None = None
    operation: str | None = None
    seconds: float | None = None
    count: int = 1
    path: str = ""
    sends: signal.Signals = signal.SIGKILL

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.event, self.operation, self.seconds)) != 1:
            raise ConfigurationError(f"{self}: give exactly one of event=, operation=, seconds=")
        if self.count < 1:
            raise ConfigurationError(f"FaultPlan(count={self.count}): must be at least 1")

    def arm(self) -> Callable[[], None]:
        """Activate the plan in this process. Returns a function that deactivates it."""
        seen = itertools.count(1)  # next() is atomic: saves write on a thread of their own

        def strike() -> None:
            os.kill(os.getpid(), self.sends)

        def count(_: object) -> None:
            if next(seen) == self.count:
                strike()

        def watch(operation: str, path: Path) -> None:
            if self.operation in ("any", operation) and self.path in str(path):
                count(path)

        if self.event is not None:
            return register_global_callback(_AtEvent(self.event, count)).remove
        if self.operation is not None:
            former, filesystem.watcher = filesystem.watcher, watch
            return partial(setattr, filesystem, "watcher", former)
        timer = threading.Timer(self.seconds or 0.0, strike)
        timer.daemon = True
        timer.start()
        return timer.cancel

    def __str__(self) -> str:
        by = "" if self.sends is signal.SIGKILL else f"by {self.sends.name} "
        if self.event is not None:
            return f"{by}at {self.event.handler} no. {self.count}"
        if self.operation is not None:
            where = f" of {self.path}" if self.path else ""
            return f"{by}before {self.operation}{where} no. {self.count}"
        return f"{by}after {self.seconds:.2f} s"


class _AtEvent(Callback):
    sets_control_flags = False

    def __init__(self, event: Event, handler: Callable[[Any], None]) -> None:
        setattr(self, event.handler, handler)
