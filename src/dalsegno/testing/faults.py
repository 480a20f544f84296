"""FaultPlan: a process sends itself a signal at a given point. EventTrace: where a run can be killed, at random.

The signal is SIGKILL by default, as an out-of-memory killer would send it.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dalsegno.checkpoint import names
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import FlaglessCallback
from dalsegno.events.contexts import Context
from dalsegno.events.registration import register_global_callback
from dalsegno.events.table import Event
from dalsegno.stateful.annotations import check_types
from dalsegno.system import filesystem

Operation = Literal["write", "fsync", "rename", "mkdir", "link", "unlink", "truncate", "any"]


@check_types
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
        ConfigurationError: for none or several of the three, a count below 1, or seconds that are not 0 or more.
        UnknownName: for another operation.
    """

    event: Event | None = None
    operation: Operation | None = None
    seconds: float | None = None
    count: int = 1
    path: str = ""
    sends: signal.Signals = signal.SIGKILL

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.event, self.operation, self.seconds)) != 1:
            raise ConfigurationError(f"{self!r}: give exactly one of event=, operation=, seconds=")
        if self.count < 1:
            raise ConfigurationError(f"FaultPlan(count={self.count}): must be at least 1")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise ConfigurationError(f"FaultPlan(seconds={self.seconds}): must be 0 or more")

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


class _AtEvent(FlaglessCallback):
    def __init__(self, event: Event, handler: Callable[[Any], None]) -> None:
        setattr(self, event.handler, handler)


@dataclass(frozen=True, slots=True)
class EventTrace:
    """What happened in a run from its first step to its last."""

    steps: int
    writes: Mapping[int, int]
    """Step of each checkpoint → number of writes it took."""
    epoch_ends: Sequence[int] = ()
    """Finished steps at the end of each epoch."""

    def random_kills(self, seed: int) -> list[FaultPlan]:
        """Two kills at random: between two steps of the first leg, and during a save of the second.

        The second hits a checkpoint after the step of the first kill, so that both are certain to happen wherever the
        second leg resumes. Fewer where the run is too short or saves nothing.
        """
        chance = random.Random(seed)
        plans, steps_done = [], 0
        saves = sorted(self.writes)
        lossy = [step for step in range(saves[0], saves[-1]) if step not in self.writes] if saves else []
        if between := lossy or range(1, self.steps):
            steps_done = chance.choice(between)
            plans.append(FaultPlan(event=Event.STEP_BEGIN, count=steps_done + 1))
        if ahead := [step for step in saves if step > steps_done]:
            step = chance.choice(ahead)
            count = chance.randint(1, self.writes[step])
            plans.append(FaultPlan(operation="write", path=_partial(step), count=count))
        return plans

    def interrupted_save(self, plan: FaultPlan) -> int:
        """The step whose save a plan of :meth:`random_kills` interrupts; training may be steps ahead of it."""
        return next(step for step in self.writes if plan.path == _partial(step))


def _partial(step: int) -> str:
    return names.partial_path(names.checkpoint_path(Path(), step)).name


class EventRecorder(FlaglessCallback):
    """Records the trace of the run that this process trains, from its first step."""

    def __init__(self) -> None:
        self._steps = 0
        self._writes: Counter[int] = Counter()
        self._epoch_ends: list[int] = []

    def start(self) -> None:
        """Record from now on."""
        register_global_callback(self)
        filesystem.watcher = self._watch

    def trace(self) -> EventTrace:
        """The trace so far."""
        return EventTrace(self._steps, dict(self._writes), tuple(self._epoch_ends))

    def on_step_begin(self, ctx: Context) -> None:
        self._steps += 1

    def on_epoch_end(self, ctx: Context) -> None:
        self._epoch_ends.append(self._steps)

    def _watch(self, operation: str, path: Path) -> None:
        saving = next((each for each in (path, *path.parents) if names.is_partial(each)), None)
        if operation == "write" and saving is not None and (step := names.step_of(saving.with_suffix(""))) is not None:
            self._writes[step] += 1
