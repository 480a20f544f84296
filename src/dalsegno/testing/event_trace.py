"""What a whole run goes through, noted while it is trained; and moments in it at which it can be killed, by chance."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context
from dalsegno.events.registration import register_global_callback
from dalsegno.events.table import Event
from dalsegno.system import filesystem

from .faults import FaultPlan

_SAVING = re.compile(r"step-(\d+)\.partial")


@dataclass(frozen=True, slots=True)
class EventTrace:
    """The way of a run from its first step to its last."""

    steps: int
    writes: Mapping[int, int]
    """How many writes each checkpoint took, under its step."""
    epoch_ends: Sequence[int] = ()
    """The steps that were finished when each epoch ended."""

    def moments(self, seed: int) -> list[FaultPlan]:
        """Two moments at random: between two steps of the first leg, and in a save of the leg after it.

        The second is a write of a checkpoint that lies ahead of that leg wherever the first has thrown it back to, so
        both are certain to come. One, or none, where the run is too short or saves nothing.
        """
        chance = random.Random(seed)
        plans, steps_done = [], 0
        if between := self._between_saves() or range(1, self.steps):
            steps_done = chance.choice(between)
            plans.append(FaultPlan(event=Event.STEP_BEGIN, count=steps_done + 1))
        if ahead := sorted(step for step in self.writes if step > steps_done):
            step = chance.choice(ahead)
            count = chance.randint(1, self.writes[step])
            plans.append(FaultPlan(operation="write", path=_partial(step), count=count))
        return plans

    def save_struck(self, plan: FaultPlan) -> int:
        """The step whose save is cut short by a plan of :meth:`moments`; training may be steps ahead of it."""
        return next(step for step in self.writes if plan.path == _partial(step))

    def _between_saves(self) -> list[int]:
        """Where a kill costs steps: after the first checkpoint, before the last, and not just at one."""
        saves = sorted(self.writes)
        return [step for step in range(saves[0], saves[-1]) if step not in self.writes] if saves else []


def _partial(step: int) -> str:
    return f"step-{step:08d}.partial"


class EventRecorder(Callback):
    """Notes the course of the run that this process is about to train from its beginning."""

    makes_wishes = False

    def __init__(self) -> None:
        self._steps = 0
        self._writes: Counter[int] = Counter()
        self._epoch_ends: list[int] = []

    def start(self) -> None:
        """From now on."""
        register_global_callback(self)
        filesystem.watcher = self._watch

    def course(self) -> EventTrace:
        """What has been noted so far."""
        return EventTrace(self._steps, dict(self._writes), tuple(self._epoch_ends))

    def on_step_begin(self, ctx: Context) -> None:
        self._steps += 1

    def on_epoch_end(self, ctx: Context) -> None:
        self._epoch_ends.append(self._steps)

    def _watch(self, operation: str, path: Path) -> None:
        saving = _SAVING.search(str(path)) if operation == "write" else None
        if saving:
            self._writes[int(saving[1])] += 1
