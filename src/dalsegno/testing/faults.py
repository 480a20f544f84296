"""FaultPlan: the moment at which a process kills itself with SIGKILL, as an out-of-memory killer would."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno import files
from dalsegno.callback import Callback, register_global_callback
from dalsegno.errors import ConfigurationError
from dalsegno.events import Event


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Exactly one of the three.

    Args:
        event: kill when this event fires for the ``count``-th time.
        operation: kill before the ``count``-th file operation of this kind (``write``, ``fsync``, ``rename``,
            ``mkdir``, ``unlink``, ``truncate``, or ``any``) on a path that contains ``path``.
        seconds: kill this long after the plan is armed: wherever that happens to be.
    """

    event: Event | None = None
    operation: str | None = None
    seconds: float | None = None
    count: int = 1
    path: str = ""

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.event, self.operation, self.seconds)) != 1:
            raise ConfigurationError(f"{self}: give one of event=, operation=, seconds=")
        if self.count < 1:
            raise ConfigurationError(f"FaultPlan(count={self.count}): counts from 1")

    def arm(self) -> None:
        """From now on, this process is going to die."""
        if self.event is not None:
            register_global_callback(_KillAtEvent(self.event, self.count))
        elif self.operation is not None:
            files.watcher = _KillAtOperation(self.operation, self.count, self.path)
        elif self.seconds is not None:
            timer = threading.Timer(self.seconds, die)
            timer.daemon = True
            timer.start()

    def __str__(self) -> str:
        if self.event is not None:
            return f"at {self.event.handler} no. {self.count}"
        if self.operation is not None:
            where = f" of {self.path}" if self.path else ""
            return f"before {self.operation}{where} no. {self.count}"
        return f"after {self.seconds:.2f} s"


def die() -> None:
    """End this process at once: no handler, no clean-up, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Countdown:
    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self, ctx: Any) -> None:
        self._left -= 1
        if self._left == 0:
            die()


class _KillAtEvent(Callback):
    makes_wishes = False

    def __init__(self, event: Event, count: int) -> None:
        setattr(self, event.handler, _Countdown(count))


class _KillAtOperation:
    def __init__(self, operation: str, count: int, path: str) -> None:
        self._operation, self._left, self._path = operation, count, path

    def __call__(self, operation: str, path: Path) -> None:
        if self._operation in ("any", operation) and self._path in str(path):
            self._left -= 1
            if self._left == 0:
                die()
