"""Lineage: the process lives of a run, and what became of what each has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """One leg, as it looks afterwards. Times are UTC seconds, steps are counts of finished optimizer steps."""

    leg: int
    """From 1."""
    parent: int | None
    """The leg from whose checkpoint it went on; None if it began at the beginning."""
    from_checkpoint: str | None
    first_step: int
    last_step: int
    """The last one that is known of: a leg that died may have gone a little farther than it could log."""
    redone: int
    """Steps that had been done and that its successor did again, since they came after its checkpoint."""
    world_size: int
    host: str
    pid: int
    started: float
    ended: float
    """If it could not say, or lives: when it was last heard of."""
    reason: str | None
    """``finished``, ``stopped``, ``aborted``, ``exhausted``, ``exception``, ``interrupted``, ``died``; None while it
    lives."""
    by: str | None
    why: str | None
    idle: float | None
    """Seconds from its end to its successor's start; None if it has none."""
    cut_off: tuple[Tail, ...]
    """What was cut off of the log when it began, or by rollbacks of the leg before."""


def read_lives(
    output_dir: Path, tails: Sequence[Tail], times: NDArray[np.float64], steps: NDArray[np.int64]
) -> list[LegSummary]:
    """The legs of the run in ``output_dir``; none if it has no ``run.json``.

    Args:
        tails: what was cut off of its log.
        times: of the records that are in its log, shape (n,).
        steps: the same records', shape (n,).

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
    starts = [leg.started for leg in run.legs] + [float("inf")]
    lives: list[LegSummary] = []
    for number, leg in enumerate(run.legs):
        own = (times >= leg.started) & (times < starts[number + 1])
        alive = running and leg is run.legs[-1]
        life = _life(leg, lives, float(times[own].max(initial=0)), int(steps[own].max(initial=0)), alive)
        before = starts[number - 1] if number else -float("inf")
        cut = tuple(tail for tail in tails if before <= tail.timestamp < leg.started)
        lives.append(replace(life, cut_off=cut))
    return [_beside(life, after) for life, after in zip(lives, [*lives[1:], None], strict=True)]


def state_of(lives: Sequence[LegSummary], final: bool, last_loss_is_finite: bool) -> State:
    """What has become of a run: ``final``: whether its log says that it was trained to its end."""
    if not lives:
        return "finished" if final else "unknown" if last_loss_is_finite else "diverged"
    last = lives[-1]
    if last.reason is None:
        return "running"
    if last.reason in ("stopped", "aborted") and _is_divergence(last):
        return "diverged"
    states: dict[str, State] = {"finished": "finished", "exhausted": "finished", "exception": "failed", "died": "died"}
    return states.get(last.reason, "stopped")


def training_seconds(lives: Sequence[LegSummary]) -> float:
    """Seconds in which a process of the run was alive and heard of."""
    return sum(life.ended - life.started for life in lives)


def _is_divergence(life: LegSummary) -> bool:
    return "diverge" in f"{life.by or ''} {life.why or ''}".lower()


def _life(leg: Leg, earlier: Sequence[LegSummary], heard: float, reached: int, alive: bool) -> LegSummary:
    """``heard``: when the last record of this leg was logged, ``reached``: its highest step."""
    return LegSummary(
        leg=leg.leg,
        parent=_parent(leg, earlier),
        from_checkpoint=leg.from_checkpoint,
        first_step=leg.first_step,
        last_step=max(leg.last_step, reached),
        redone=0,
        world_size=leg.world_size,
        host=leg.host,
        pid=leg.pid,
        started=leg.started,
        ended=max(leg.started, heard) if leg.ended is None else leg.ended,
        reason=leg.reason or (None if alive else "died"),
        by=leg.by,
        why=leg.why,
        idle=None,
        cut_off=(),
    )


def _beside(life: LegSummary, after: LegSummary | None) -> LegSummary:
    if after is None:
        return life
    idle = max(0.0, after.started - life.ended)
    return replace(life, redone=max(0, life.last_step - after.first_step), idle=idle)


def _parent(leg: Leg, earlier: Sequence[LegSummary]) -> int | None:
    """The latest of those that have passed the step at which it went on."""
    if leg.from_checkpoint is None:
        return None
    passed = [life.leg for life in earlier if life.first_step < leg.first_step <= life.last_step]
    return max(passed, default=earlier[-1].leg if earlier else None)
