"""The demo from beginning to end: train, kill, resume, compare, plot."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from dalsegno.checkpoint import Checkpoint
from dalsegno.checkpoint.format.names import CHECKPOINTS
from dalsegno.cli.console import LegLine
from dalsegno.errors import RankFailed
from dalsegno.testing import FaultPlan, compare_runs
from dalsegno.testing.event_trace import EventTrace

from .legs import Job, LegEnd, run_leg
from .plot import LegSpan, draw
from .training import source_files

_print = partial(print, flush=True)


def tell(out: Path, steps: int, seed: int) -> int:
    """Run the demo. Returns 0 if nothing differs, else 1."""
    began = time.monotonic()
    paths = source_files()
    size = sum(path.stat().st_size for path in paths) / 1e6
    _print(f"Training a small transformer on Python's standard library: {len(paths)} files, {size:.1f} MB.")

    _print("\nReference run, without interruption")
    trace = _reference(Job(out / "reference", out / "console" / "reference.txt", steps, seed))

    _print("\nThe same run, killed twice at random steps and restarted each time")
    legs = _killed_and_resumed(Job(out / "killed", out / "console" / "killed.txt", steps, seed), trace)

    comparison = compare_runs(out / "reference", out / "killed")
    _print(f"\nKilled run compared with the reference\n\n{comparison.table()}\n")
    _print("Nothing differs." if comparison.identical else "THE RUNS DIFFER.")
    _print(f"Plot of both losses and the kills: {draw(out / 'loss.png', out / 'reference', out / 'killed', legs)}")
    _print(f"Total time: {time.monotonic() - began:.0f} s.")
    return 0 if comparison.identical else 1


def _reference(job: Job) -> EventTrace:
    line = LegLine("reference", job.steps)
    end = run_leg(job, None, line.advance)
    line.end(["finished"])
    assert end.trace is not None, "only a leg with a plan is killed"
    return end.trace


def _killed_and_resumed(job: Job, trace: EventTrace) -> list[LegSpan]:
    legs = []
    for number, plan in enumerate([*trace.random_kills(job.seed), None], start=1):
        line = LegLine(f"leg {number}", job.steps)
        end = run_leg(job, plan, line.advance)
        line.end(_outcome(job, plan, end, trace))
        legs.append(LegSpan(end.first, end.last, None if plan is None else _moment(plan)))
    return legs


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


def _moment(plan: FaultPlan) -> str:
    return "between two steps" if plan.operation is None else "while saving"
