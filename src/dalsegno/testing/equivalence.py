"""check_resume, assert_resume_equivalent: kill a run, resume it, and compare it with an uninterrupted one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol, cast

from dalsegno import config
from dalsegno.errors import ConfigurationError
from dalsegno.logs import RunFile
from dalsegno.training.result import TrainResult

from .compare import RunComparison, compare_runs
from .faults import EventRecorder, EventTrace, FaultPlan
from .processes import start_ranks, values


class Trains(Protocol):
    """A Trainer, or another object whose ``train()`` resumes a run and trains it to its end."""

    def train(self) -> TrainResult | None: ...


Factory = Callable[..., Trains]
"""Builds the trainer of a run, with model and data, in the directory that it gets as ``output_dir=``, the same way at
each call. Must be at the top level of a module, so that other processes can import it."""


def check_resume(
    factory: Factory,
    kill_at: Sequence[FaultPlan] | None = None,
    *,
    folder: Path,
    world_size: int = 1,
    timeout: float = 300.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> RunComparison:
    """Train once without interruption, and once killed by each plan in turn and resumed; then compare the two runs.

    Every leg is a new process, or one per rank. A plan is skipped if its leg finishes first.

    Args:
        factory: builds the trainer in the given directory.
        kill_at: one plan for each leg to kill; None: two at random, between two steps and during a save.
        folder: gets the two runs, ``reference`` and ``killed``.
        world_size: number of ranks, joined over gloo.
        timeout: time limit of each leg, in seconds.
        seed: seed of the random plans.
        say: called with each line of progress.

    Raises:
        RankFailed: if a leg raises or exceeds its time limit.
        ConfigurationError: if no leg was killed.
    """
    reference, killed = folder / "reference", folder / "killed"
    trace = _leg(factory, reference, None, world_size, timeout)
    assert trace is not None, "no plan, no kill"
    say(f"reference: finished without interruption after {trace.steps} steps")
    kills = 0
    for plan in trace.random_kills(seed) if kill_at is None else kill_at:
        died = _leg(factory, killed, plan, world_size, timeout) is None
        kills += died
        say(f"killed {plan}" if died else f"the run finished before it could be killed {plan}")
    if not kills:
        raise ConfigurationError(f"the run of {trace.steps} steps was never killed; kill it earlier, or train longer")
    _leg(factory, killed, None, world_size, timeout)
    say("resumed: finished")
    for leg in RunFile(killed).legs():
        if leg.resumed is not None:
            say(f"leg {leg.leg}: {leg.resumed.line}")
    return compare_runs(reference, killed)


def assert_resume_equivalent(
    factory: Factory,
    kill_at: Sequence[FaultPlan] | None = None,
    *,
    world_size: int = 1,
    timeout: float = 300.0,
    folder: Path | None = None,
) -> None:
    """Assert that :func:`check_resume` finds no difference; ``folder`` None: in a temporary directory.

    Raises:
        AssertionError: if anything differs, with the table of the comparison and the first differing record and tensor.
    """
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="dalsegno-resume-") as place:
        comparison = check_resume(factory, kill_at, folder=Path(place), world_size=world_size, timeout=timeout)
    assert comparison.identical, f"the resumed run differs from the uninterrupted one\n{comparison.table()}"


def build_in(output_dir: Path, factory: Factory) -> Trains:
    """The trainer of a run in this directory."""
    name = getattr(factory, "__qualname__", type(factory).__name__)
    given = {"output_dir": output_dir, "callbacks": []}
    return cast(Trains, config.Factory(factory, name).bind(given, {})())


def _leg(
    factory: Factory, output_dir: Path, plan: FaultPlan | None, world_size: int, timeout: float
) -> EventTrace | None:
    """Run one leg; returns rank 0's trace, or None if the plan, armed on rank 0, killed or stopped it."""
    outcomes = start_ranks(_train, world_size, factory, output_dir, plan).wait(timeout)
    if outcomes[0].was_killed and plan is not None:
        return None
    return cast("EventTrace | None", values(outcomes)[0])


def _train(factory: Factory, output_dir: Path, plan: FaultPlan | None) -> EventTrace | None:
    from dalsegno.distributed import collectives

    recorder = EventRecorder()
    if collectives.rank() == 0:
        if plan is None:
            recorder.start()
        else:
            plan.arm()
    result = build_in(output_dir, factory).train()
    was_stopped = plan is not None and result is not None and result.stopped_by == "signal"
    return None if was_stopped else recorder.trace()
