"""The demo's legs: each a process of its own, watched from here, and killed where its plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from dalsegno.cli.console import redirect_output
from dalsegno.errors import RankFailed
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context, LogContext, StepEndContext
from dalsegno.testing import FaultPlan, start_ranks
from dalsegno.testing.event_trace import EventRecorder, EventTrace

from .training import build

Watch = Callable[[int, float | None], None]
"""Told each step that is done, and the loss last logged; first the step that the leg begins at."""

NO_END = 24 * 3600.0  # seconds: a person watches, and has Ctrl-C


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and where what it prints goes."""

    output_dir: Path
    console: Path
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class LegEnd:
    """How a leg went."""

    first: int
    """The step it began at."""
    last: int
    """The last step it finished."""
    course: EventTrace | None
    """What it went through; None: it was killed."""


def run_leg(job: Job, plan: FaultPlan | None, watch: Watch) -> LegEnd:
    """Train in a new process, to the end or until the plan kills it.

    Raises:
        RankFailed: if it ends in another way.
    """
    incoming, outgoing = Pipe(duplex=False)
    leg = start_ranks(_train, 1, job, plan, outgoing)
    outgoing.close()
    first, last = None, 0
    try:
        while (news := _next(incoming)) is not None:
            last = news[0]
            first = last if first is None else first
            watch(*news)
    except BaseException:  # Ctrl-C, a closed pipe: no leg trains on behind the back of whoever asked for the end
        leg.kill()
        leg.wait()
        raise
    finally:
        incoming.close()
    outcome = leg.wait(NO_END)[0]
    if outcome.exit_code != 0 and not (outcome.was_killed and plan is not None):
        raise RankFailed(f"a leg ended with {outcome.exit_code}; see {job.console}\n{outcome.error or ''}")
    return LegEnd(first or 0, last, cast(EventTrace | None, outcome.value))


def _next(incoming: Connection) -> tuple[int, float | None] | None:
    """What the leg says next; None once it is gone. What it said before it was killed still arrives."""
    try:
        return cast(tuple[int, float | None], incoming.recv())
    except EOFError:
        return None


def _train(job: Job, plan: FaultPlan | None, outgoing: Connection) -> EventTrace:
    redirect_output(job.console)
    recorder = EventRecorder()
    if plan is None:
        recorder.start()
    else:
        plan.arm()
    build(job.output_dir, steps=job.steps, seed=job.seed, watchers=[_Reporter(outgoing)]).train()
    outgoing.close()
    return recorder.course()


class _Reporter(Callback):
    """Tells the demo how far this leg is."""

    def __init__(self, outgoing: Connection) -> None:
        self._outgoing = outgoing
        self._loss: float | None = None

    def on_train_begin(self, ctx: Context) -> None:
        self._outgoing.send((ctx.state.global_step, None))

    def on_log(self, ctx: LogContext) -> None:
        loss: Any = ctx.logs.get("loss")
        self._loss = self._loss if loss is None else float(loss)

    def on_step_end(self, ctx: StepEndContext) -> None:
        self._outgoing.send((ctx.state.global_step, self._loss))
