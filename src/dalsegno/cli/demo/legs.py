"""The demo's legs: each trains in its own process, reports its progress, and is killed by its fault plan."""

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
"""Called with each finished step and the last logged loss; first with the step at which the leg starts."""

NO_TIMEOUT = 24 * 3600.0  # seconds: the user watches, and can press Ctrl-C


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, and the file for its output."""

    output_dir: Path
    console: Path
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class LegEnd:
    """How a leg ended."""

    first: int
    """The step at which it started."""
    last: int
    """The last finished step."""
    trace: EventTrace | None
    """None if it was killed."""


def run_leg(job: Job, plan: FaultPlan | None, watch: Watch) -> LegEnd:
    """Train in a new process, to the end or until ``plan`` kills it.

    Raises:
        RankFailed: if it ends in any other way.
    """
    incoming, outgoing = Pipe(duplex=False)
    leg = start_ranks(_train, 1, job, plan, outgoing)
    outgoing.close()
    first, last = None, 0
    try:
        while (progress := _next(incoming)) is not None:
            last = progress[0]
            first = last if first is None else first
            watch(*progress)
    except BaseException:  # Ctrl-C or a closed pipe ends the leg as well
        leg.kill()
        leg.wait()
        raise
    finally:
        incoming.close()
    outcome = leg.wait(NO_TIMEOUT)[0]
    if outcome.exit_code != 0 and not (outcome.was_killed and plan is not None):
        raise RankFailed(f"a leg failed with exit status {outcome.exit_code}; see {job.console}\n{outcome.error or ''}")
    return LegEnd(first or 0, last, cast(EventTrace | None, outcome.value))


def _next(incoming: Connection) -> tuple[int, float | None] | None:
    """Next report of the leg; None after its end. Reports sent before a kill still arrive."""
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
    return recorder.trace()


class _Reporter(Callback):
    """Reports the progress of this leg to the demo."""

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
