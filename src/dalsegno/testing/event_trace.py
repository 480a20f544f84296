"""EventTrace: steps, epochs and checkpoint writes of an uninterrupted run; chooses random points to kill it at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint import names
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context
from dalsegno.events.registration import register_global_callback
from dalsegno.events.table import Event
from dalsegno.system import filesystem

from .faults import FaultPlan


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
        if between := self._between_saves() or range(1, self.steps):
            steps_done = chance.choice(between)
            plans.append(FaultPlan(event=Event.STEP_BEGIN, count=steps_done + 1))
        if ahead := sorted(step for step in self.writes if step > steps_done):
            step = chance.choice(ahead)
            count = chance.randint(1, self.writes[step])
            plans.append(FaultPlan(operation="write", path=_partial(step), count=count))
        return plans

    def interrupted_save(self, plan: FaultPlan) -> int:
        """The step whose save a plan of :meth:`random_kills` interrupts; training may be steps ahead of it."""
        return next(step for step in self.writes if plan.path == _partial(step))

    def _between_saves(self) -> list[int]:
        """Steps at which a kill loses work: after the first checkpoint, before the last, and not at one."""
        saves = sorted(self.writes)
        return [step for step in range(saves[0], saves[-1]) if step not in self.writes] if saves else []


def _partial(step: int) -> str:
    return names.partial_path(names.checkpoint_path(Path(), step)).name


class EventRecorder(Callback):
    """Records the trace of the run that this process trains, from its first step."""

    sets_control_flags = False

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
