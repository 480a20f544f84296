"""Runs whose callbacks come, go and change between legs. At the top of a module, so that ranks can import them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan
from support.listeners import Listener, Trace
from support.models import Line
from support.small import small_trainer


class Steps(Trace):
    """Counts the steps that it has seen, the same on all ranks."""


class Own(Trace):
    """Counts them on each rank by itself, ten times as fast on the second."""

    state_scope = "per_rank"

    def on_step_end(self, ctx: Any) -> None:
        self.steps += 10 if collectives.rank() else 1


class Shared(Own):
    """The same, which knows what to do for another number of ranks: the first one gets the sum."""

    @classmethod
    def reshard(cls, states: Sequence[dict[str, int]], world_size: int) -> list[dict[str, int]]:
        return [{"steps": sum(state["steps"] for state in states)}, *({"steps": 0} for _ in range(world_size - 1))]


class StepsOfToday(Steps):
    aliases = ("Steps",)


class StepsInHundreds(Steps):
    """A later version of the same class, which counts in hundreds."""

    state_version = 2

    def state_dict(self) -> dict[str, int]:
        return {"hundredths": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["hundredths"]

    def migrate(self, state: dict[str, int], from_version: int) -> dict[str, int]:
        assert from_version == 1
        return {"hundredths": 100 * state["steps"]}


class StepsWithoutAWay(StepsInHundreds):
    migrate = None  # type: ignore[assignment]


CASTS: dict[str, Callable[[], list[Trace]]] = {
    "both": lambda: [Steps(), Own()],
    "shared": lambda: [Steps(), Shared("Own")],
    "nobody": list,
    "steps": lambda: [Steps()],
    "renamed": lambda: [StepsOfToday()],
    "second version": lambda: [StepsInHundreds("Steps")],
    "no way": lambda: [StepsWithoutAWay("Steps")],
}


def leg(output_dir: Path, cast: str, stop_at: int, kill_at: int | None = None, **how: Any) -> dict[str, Any]:
    """Train to ``stop_at`` with that cast, or be killed in the step after ``kill_at`` finished ones of this leg.

    A checkpoint every two steps. What was loaded is told.
    """
    if kill_at is not None:
        FaultPlan(event=Event.OPTIMIZER_STEP, count=kill_at + 1).arm()
    callbacks, seen = CASTS[cast](), dict[str, Any](report=None, loaded={})

    def note(ctx: Any) -> None:
        seen["step"] = ctx.step
        seen["report"] = ctx.report
        seen["loaded"] = {callback.key: callback.steps for callback in callbacks}

    parallel = "ddp" if collectives.world_size() > 1 else "none"
    note_taker = Listener({"on_load": note}, name="note taker")
    trainer = small_trainer(
        output_dir,
        note_taker,
        *callbacks,
        model=Line(),
        parallel=parallel,
        max_steps=stop_at,
        save_steps=2,
        save_in_background=False,  # so that a kill finds the checkpoints that are due by then
    )
    result: ds.TrainResult = trainer.train(**how)
    return seen | {"end": result.global_step, "steps": {callback.key: callback.steps for callback in callbacks}}
