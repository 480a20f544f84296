"""Kill a run, resume it, and show that it is as if it had never been killed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

from dalsegno.errors import ConfigurationError
from dalsegno.training.result import TrainResult

from .compare import Comparison, compare_runs
from .event_trace import EventRecorder, EventTrace
from .faults import FaultPlan
from .processes import start_ranks, values


class Trains(Protocol):
    """A Trainer, or whatever else brings a run to its end from where it is."""

    def train(self) -> TrainResult | None: ...


Factory = Callable[[Path], Trains]
"""Builds the trainer of a run in the given folder, model and data included: the same each time it is called. It must
stand at the top of a module, so that other processes can import it."""


def check_resume(
    factory: Factory,
    kill_at: Sequence[FaultPlan] | None = None,
    *,
    folder: Path,
    world_size: int = 1,
    timeout: float = 300.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run ``factory``'s trainer uninterrupted, and killed at each of the moments and resumed; then compare.

    Every leg is a process of its own, or one for each rank. A moment that a leg does not live to see passes by.

    Args:
        kill_at: a moment for each leg that is to be killed; None: two at random, between steps and in a save.
        folder: gets the two runs, ``reference`` and ``killed``.
        world_size: ranks, joined over gloo.
        timeout: seconds for each leg.
        seed: of the random moments.
        say: told what happens, a line at a time.

    Raises:
        RankFailed: if a leg ends with an error of its own, or takes too long.
        ConfigurationError: if none of the moments came.
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
    return compare_runs(reference, killed)


def assert_resume_equivalent(
    factory: Factory,
    kill_at: Sequence[FaultPlan] | None = None,
    *,
    world_size: int = 1,
    timeout: float = 300.0,
    folder: Path | None = None,
) -> None:
    """As :func:`check_resume`, in a temporary folder unless one is given.

    Raises:
        AssertionError: if anything differs, with the table of all that was compared, down to the first differing
            record and tensor.
    """
    with _folder(folder) as place:
        comparison = check_resume(factory, kill_at, folder=place, world_size=world_size, timeout=timeout)
    assert comparison.identical, f"the resumed run differs from the uninterrupted one\n{comparison.table()}"


def _leg(
    factory: Factory, output_dir: Path, plan: FaultPlan | None, world_size: int, timeout: float
) -> EventTrace | None:
    """One leg, and what rank 0 went through; None if it was killed (there the plan is armed) or stopped in time."""
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
    result = factory(output_dir).train()
    was_stopped = plan is not None and result is not None and result.stopped_by == "signal"
    return None if was_stopped else recorder.trace()


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="dalsegno-resume-") as name:
        yield Path(name)
