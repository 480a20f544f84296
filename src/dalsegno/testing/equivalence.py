"""Kill a run, resume it, and show that it is as if it had never been killed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dalsegno.errors import RankFailed
from dalsegno.result import TrainResult

from .compare import Comparison, compare_runs
from .faults import FaultPlan
from .processes import start_ranks


class Trains(Protocol):
    """A Trainer, or whatever else brings a run to its end from where it is."""

    def train(self) -> TrainResult | None: ...


Factory = Callable[[Path], Trains]
"""Builds the trainer of a run in the given folder, model and data included: the same each time it is called. It must
stand at the top of a module, so that other processes can import it."""


def check_resume(
    factory: Factory,
    kill_at: Sequence[FaultPlan],
    *,
    folder: Path,
    world_size: int = 1,
    timeout: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run ``factory``'s trainer uninterrupted, and killed at each of the moments and resumed; then compare.

    Every leg is a process of its own, or one for each rank. A moment that a leg does not live to see passes by.

    Args:
        folder: gets the two runs, ``reference`` and ``killed``.
        world_size: ranks, joined over gloo.
        timeout: seconds for each leg.
        say: told what happens, a line at a time.

    Raises:
        RankFailed: if a leg ends with an error of its own, or takes too long.
    """
    reference, killed = folder / "reference", folder / "killed"
    _leg(factory, reference, None, world_size, timeout)
    say("reference: trained to its end, uninterrupted")
    for plan in kill_at:
        died = _leg(factory, killed, plan, world_size, timeout)
        say(f"killed {plan}" if died else f"the run ended before it could be killed {plan}")
    _leg(factory, killed, None, world_size, timeout)
    say("resumed: trained to its end")
    return compare_runs(reference, killed)


def assert_resume_equivalent(
    factory: Factory,
    kill_at: Sequence[FaultPlan],
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


def _leg(factory: Factory, output_dir: Path, plan: FaultPlan | None, world_size: int, timeout: float) -> bool:
    """One leg, to its end or until it is killed: then True. On rank 0 the plan is armed; the others lose their peer."""
    outcomes = start_ranks(_train, world_size, factory, output_dir, plan).wait(timeout)
    if outcomes[0].was_killed and plan is not None:
        return True
    failed = [outcome for outcome in outcomes if outcome.exit_code != 0]
    if failed:
        raise RankFailed(f"rank {failed[0].rank} ended with {failed[0].exit_code}\n{failed[0].error or ''}")
    return False


def _train(factory: Factory, output_dir: Path, plan: FaultPlan | None) -> None:
    from dalsegno import ranks

    if plan is not None and ranks.rank() == 0:
        plan.arm()
    factory(output_dir).train()


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="dalsegno-resume-") as name:
        yield Path(name)
