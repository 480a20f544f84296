"""The demo from beginning to end: train, kill, resume, compare, plot. Each leg trains in its own process."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from dalsegno.analysis import open_log
from dalsegno.checkpoint import Checkpoint
from dalsegno.checkpoint.names import CHECKPOINTS
from dalsegno.cli.console import LegLine, redirect_output
from dalsegno.errors import RankFailed
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context, LogContext, StepEndContext
from dalsegno.system.imports import how_to_install
from dalsegno.testing import FaultPlan, compare_runs, start_ranks
from dalsegno.testing.faults import EventRecorder, EventTrace

from .plot import LegSpan, draw
from .training import build, source_files

_print = partial(print, flush=True)


def tell(out: Path, steps: int, seed: int) -> int:
    """Run the demo. Returns 0 if nothing differs, else 1."""
    began = time.monotonic()
    paths = source_files()
    size = sum(path.stat().st_size for path in paths) / 1e6
    _print(f"A small transformer learns the source code of Python: {len(paths)} files, {size:.1f} MB.")

    _print("\nReference run, without interruption")
    line = LegLine("reference", steps)
    trace = run_leg(Job(out / "reference", out / "console" / "reference.txt", steps, seed), None, line.advance).trace
    line.end(["finished"])
    assert trace is not None, "only a leg with a plan is killed"

    _print("\nThe same run, killed twice at random steps and restarted each time")
    legs = _killed_and_resumed(Job(out / "killed", out / "console" / "killed.txt", steps, seed), trace)

    comparison = compare_runs(out / "reference", out / "killed")
    _print(f"\nKilled run compared with the reference\n\n{comparison.table()}\n")
    _print("Nothing differs." if comparison.identical else "THE RUNS DIFFER.")
    _print(_plot(out, legs))
    _print(f"What became of each leg: dalsegno logs lineage {shlex.quote(str(out / 'killed'))}")
    _print(f"Total time: {time.monotonic() - began:.0f} s.")
    return 0 if comparison.identical else 1


def _plot(out: Path, legs: list[LegSpan]) -> str:
    """A line that names the plot, or the reason why there is none."""
    if find_spec("matplotlib") is None:
        return f"No plot of both losses: matplotlib is not installed; {how_to_install('analysis')}"
    return f"Plot of both losses and the kills: {draw(out / 'loss.png', out / 'reference', out / 'killed', legs)}"


def _killed_and_resumed(job: Job, trace: EventTrace) -> list[LegSpan]:
    legs = []
    for number, plan in enumerate([*trace.random_kills(job.seed), None], start=1):
        line = LegLine(f"leg {number}", job.steps)
        end = run_leg(job, plan, line.advance)
        line.end([*(_resumed(job) if number > 1 else ()), *_outcome(job, plan, end, trace)])
        killed = None if plan is None else "between two steps" if plan.operation is None else "while saving"
        legs.append(LegSpan(end.first, end.last, killed))
    return legs


def _resumed(job: Job) -> list[str]:
    """Lines on how the newest leg continued the one before it."""
    summary = open_log(job.output_dir).lineage()[-1]
    moved = [f"{len(each.records)} later log records moved to rewound/{each.path.name}" for each in summary.cut_off]
    return moved if summary.leg.resumed is None else [*moved, summary.leg.resumed.line]


def _outcome(job: Job, plan: FaultPlan | None, end: LegEnd, trace: EventTrace) -> list[str]:
    """Lines on how a leg ended, checked against the files on disk. Raises RankFailed if it was not killed as
    planned."""
    if plan is None:
        return ["finished"]
    if end.trace is not None:
        raise RankFailed(f"the leg finished at step {end.last}, before it could be killed {plan}")
    if plan.operation is None:
        return [f"killed with SIGKILL between steps {end.last} and {end.last + 1}"]
    half = job.output_dir / CHECKPOINTS / plan.path
    if not half.is_dir() or Checkpoint.is_at(half):
        raise RankFailed(f"{half}: killed {plan}, which should have left a partial checkpoint there")
    step = trace.interrupted_save(plan)
    return [
        f"killed with SIGKILL while saving step {step}, before write {plan.count} of {trace.writes[step]}",
        f"leaves a partial checkpoint without a manifest: {half.name}",
    ]


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
    """Train in a new process, to the end or until ``plan`` kills it."""
    incoming, outgoing = Pipe(duplex=False)
    leg = start_ranks(_train, 1, job, plan, outgoing)
    outgoing.close()
    first, last = None, 0
    try:
        while True:
            last, loss = incoming.recv()
            first = last if first is None else first
            watch(last, loss)
    except EOFError:  # reports sent before a kill have arrived
        pass
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
