"""The demo, told from its beginning to its end."""

from __future__ import annotations

import time
from pathlib import Path

from dalsegno.cli.console import LegLine
from dalsegno.errors import RankFailed
from dalsegno.testing import FaultPlan, compare_runs
from dalsegno.testing.event_trace import EventTrace

from .legs import Job, LegEnd, run_leg
from .plot import Leg, draw
from .training import source_files


def tell(out: Path, steps: int, seed: int) -> int:
    """Train, kill, resume, compare, draw. 0 if nothing differs, else 1."""
    began = time.monotonic()
    paths = source_files()
    size = sum(path.stat().st_size for path in paths) / 1e6
    _say(f"A small transformer learns Python's standard library: {len(paths)} files, {size:.1f} MB.")

    _say("\nThe reference, trained without interruption")
    course = _reference(Job(out / "reference", out / "console" / "reference.txt", steps, seed))

    _say("\nThe same run again, killed twice at random and started again each time")
    legs = _killed_and_resumed(Job(out / "killed", out / "console" / "killed.txt", steps, seed), course)

    comparison = compare_runs(out / "reference", out / "killed")
    _say(f"\nThe killed run against the reference\n\n{comparison.table()}\n")
    _say("Nothing differs." if comparison.identical else "THE RUNS DIFFER.")
    _say(f"The losses of both, with the kills: {draw(out / 'loss.png', out / 'reference', out / 'killed', legs)}")
    _say(f"All this took {time.monotonic() - began:.0f} s.")
    return 0 if comparison.identical else 1


def _reference(job: Job) -> EventTrace:
    line = LegLine("reference", job.steps)
    end = run_leg(job, None, line.advance)
    line.end(["trained to its end"])
    assert end.course is not None, "without a plan it is not killed"
    return end.course


def _killed_and_resumed(job: Job, course: EventTrace) -> list[Leg]:
    legs = []
    for number, plan in enumerate([*course.moments(job.seed), None], start=1):
        line = LegLine(f"leg {number}", job.steps)
        end = run_leg(job, plan, line.advance)
        line.end(_outcome(job, plan, end, course))
        legs.append(Leg(end.first, end.last, None if plan is None else _moment(plan)))
    return legs


def _outcome(job: Job, plan: FaultPlan | None, end: LegEnd, course: EventTrace) -> list[str]:
    """What has happened to a leg, checked on the disk.

    Raises:
        RankFailed: if it was not killed as planned.
    """
    if plan is None:
        return ["trained to its end"]
    if end.course is not None:
        raise RankFailed(f"the leg came to its end at step {end.last}, before it could be killed {plan}")
    if plan.operation is None:
        return [f"killed with SIGKILL between steps {end.last} and {end.last + 1}"]
    half = job.output_dir / "checkpoints" / plan.path
    if not half.is_dir() or (half / "manifest.json").exists():
        raise RankFailed(f"{half}: killed {plan}, which should have left half a checkpoint there")
    step = course.save_struck(plan)
    return [
        f"killed with SIGKILL while saving step {step}, before write {plan.count} of {course.writes[step]}",
        f"half a checkpoint was left behind, without a manifest: {half.name}",
    ]


def _moment(plan: FaultPlan) -> str:
    return "between two steps" if plan.operation is None else "while saving"


def _say(line: str) -> None:
    print(line, flush=True)
