"""Lineage: the legs of a run, and what became of the work of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dalsegno.logs import Leg, RunFile
from dalsegno.system.lock import DirectoryLock

from .rewound import Tail

State = Literal["running", "finished", "stopped", "diverged", "failed", "died", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegSummary:
    """One leg, seen afterwards. Times are UTC seconds, steps are counts of finished optimizer steps."""

    leg: Leg
    """As ``run.json`` records it. A leg that was killed could not record its end: the log completes it below."""
    parent: int | None
    """Number of the leg whose checkpoint it resumed from; None if it started from scratch."""
    last_step: int
    """Last step known: a killed leg may have run a few steps further than its last record."""
    end_step: int
    """Last step known since its last rollback."""
    ended: float
    """For a leg that is running, or was killed: time of its last record."""
    reason: str | None
    """``finished``, ``stopped``, ``aborted``, ``exhausted``, ``exception``, ``interrupted``, ``died``; None while it
    runs."""
    redone: int = 0
    """Steps that the next leg repeated, because they came after the checkpoint it resumed from."""
    idle: float | None = None
    """Seconds from its end to the start of the next leg; None for the last leg."""
    cut_off: tuple[Tail, ...] = ()
    """Log tails that were cut off when this leg started, or by rollbacks within the previous leg."""


def summarize_legs(
    output_dir: Path, tails: Sequence[Tail], times: NDArray[np.float64], steps: NDArray[np.int64]
) -> list[LegSummary]:
    """The legs of the run in ``output_dir``; empty without a ``run.json``.

    Args:
        tails: tails that were cut off the run's log.
        times: UTC seconds of the records in its log, shape (n,).
        steps: steps of the same records, shape (n,).

    Raises:
        StateMismatch: if ``run.json`` is damaged, or of a newer format.
    """
    run = RunFile(output_dir).load()
    if run is None:
        return []
    running = DirectoryLock.is_held(output_dir)
    lost = [tail.series("global_step") for tail in tails]
    times = np.concatenate([times, *(series.times for series in lost if series.times is not None)])
    steps = np.concatenate([steps, *(series.steps for series in lost)])
    starts = [-float("inf"), *(leg.started for leg in run.legs), float("inf")]
    legs: list[LegSummary] = []
    for leg, previous_start, next_start in zip(run.legs, starts, starts[2:], strict=False):
        own = (times >= leg.started) & (times < next_start)
        last_record = max(leg.started, float(times[own].max(initial=0)))
        alive = running and leg is run.legs[-1]
        legs.append(
            LegSummary(
                leg=leg,
                parent=_parent(leg, legs),
                last_step=max(leg.last_step, int(steps[own].max(initial=0))),
                end_step=max(leg.last_step, int(steps[own & (times > _last_rollback(leg))].max(initial=0))),
                ended=last_record if leg.ended is None else leg.ended,
                reason=leg.reason or (None if alive else "died"),
                cut_off=tuple(tail for tail in tails if previous_start <= tail.timestamp < leg.started),
            )
        )
    return [*(_followed_by(leg, following.leg) for leg, following in pairwise(legs)), *legs[-1:]]


def state_of(legs: Sequence[LegSummary], final: bool, last_loss_is_finite: bool) -> State:
    """State of a run. ``final``: whether its log has the record of a finished training."""
    if not legs:
        return "finished" if final else "unknown" if last_loss_is_finite else "diverged"
    last = legs[-1]
    if last.reason is None:
        return "running"
    if last.reason in ("stopped", "aborted") and _is_divergence(last.leg):
        return "diverged"
    states: dict[str, State] = {"finished": "finished", "exhausted": "finished", "exception": "failed", "died": "died"}
    return states.get(last.reason, "stopped")


def training_seconds(legs: Sequence[LegSummary]) -> float:
    """Seconds during which a process of the run was known to be alive."""
    return sum(leg.ended - leg.leg.started for leg in legs)


def _last_rollback(leg: Leg) -> float:
    return leg.rollbacks[-1]["timestamp"] if leg.rollbacks else 0.0


def _is_divergence(leg: Leg) -> bool:
    return leg.diverged or "diverge" in f"{leg.by or ''} {leg.why or ''}".lower()


def _followed_by(leg: LegSummary, following: Leg) -> LegSummary:
    redone = max(0, leg.end_step - following.first_step)
    return replace(leg, redone=redone, idle=max(0.0, following.started - leg.ended))


def _parent(leg: Leg, earlier: Sequence[LegSummary]) -> int | None:
    """The latest earlier leg that passed the step at which ``leg`` resumed."""
    if leg.from_checkpoint is None:
        return None
    passed = [each.leg.leg for each in earlier if each.leg.first_step < leg.first_step <= each.last_step]
    return max(passed, default=earlier[-1].leg.leg if earlier else None)
