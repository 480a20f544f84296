"""The legs of a run, what became of the work of each, and the log tails that were cut off by restarts and rollbacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dalsegno.logs import Leg
from dalsegno.logs.journal import Journal
from dalsegno.logs.reader import numbered
from dalsegno.logs.values import Record, is_number
from dalsegno.system.lock import DirectoryLock

from .blocks import RecordBlock
from .formats.source import Skipped, own_records
from .series import Series


@dataclass(frozen=True, slots=True)
class Tail:
    """At least one record that was cut off a log when the run went back."""

    path: Path
    records: tuple[Record, ...]
    """In the order in which they were logged; each has a ``global_step``."""

    @property
    def first_step(self) -> int:
        return int(self.records[0]["global_step"])

    @property
    def last_step(self) -> int:
        return int(self.records[-1]["global_step"])

    @property
    def timestamp(self) -> float:
        """UTC seconds of the last record; NaN if it has none."""
        time: Any = self.records[-1].get("timestamp")
        return float(time) if is_number(time) else math.nan

    def series(self, metric: str) -> Series:
        """A metric in the cut-off records; empty if they do not have it."""
        block = RecordBlock([record for record in self.records if is_number(record.get(metric))])
        names = ("global_step", metric, "epoch", "timestamp")
        steps, values, epochs, times = (block.column(name).at(None) for name in names)
        return Series(metric, self.path.name, steps.astype(np.int64), values, epochs, times)


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart in a new process, or a rollback. Steps are counts of finished optimizer steps."""

    step: int
    """Step it resumed from: the checkpoint's step; for a rollback, the step before the first repeated one."""
    reached: int
    """Last step known before it; the steps after ``step`` were repeated. Equal to ``step`` if there were none."""
    leg: int | None
    """Number of the leg that started, from 2; None for a rollback within a leg."""
    reason: str | None = None
    """Why the run was taken back, or the leg before ended, if ``run.json`` records it."""

    @property
    def redone(self) -> int:
        return self.reached - self.step


@dataclass(frozen=True, slots=True)
class Intervention:
    """What the user changed at a step: a setting in the script, when a leg resumed; or a command that took effect."""

    step: int
    time: float
    """UTC seconds."""
    what: str
    by: str
    """The command's sender, or the leg."""


def find_interventions(output_dir: Path, legs: Sequence[Leg]) -> list[Intervention]:
    """In the order of steps."""
    settings = [
        Intervention(leg.first_step, leg.started, each, f"leg {leg.leg}") for leg in legs for each in leg.changed
    ]
    commands = [
        Intervention(entry.step, entry.time, str(entry), entry.by)
        for entry in Journal(output_dir).read()
        if entry.step is not None and entry.error is None
    ]
    return sorted([*settings, *commands], key=lambda each: (each.step, each.time))


def read_tails(log: Path) -> list[Tail]:
    """The archived tails of a log file, oldest first, after those of the files that the log continues
    (``train.jsonl`` for ``train-2.jsonl``). Tails without a record with a step are left out."""
    stem, number = numbered(log.stem)
    archived = []
    for path in (log.parent / "rewound").glob(f"*{log.suffix}.*"):
        name, _, place = path.name.rpartition(".")
        its_stem, its_number = numbered(name.removesuffix(log.suffix))
        if its_stem == stem and its_number <= number:
            archived.append((its_number, place, path))
    tails = [Tail(path, tuple(own_records(path, Skipped()))) for *_, path in sorted(archived)]
    return [tail for tail in tails if tail.records]


def _rolled_back(leg: Leg) -> float:
    """UTC seconds of its last rollback; 0 without one."""
    return leg.rollbacks[-1]["timestamp"] if leg.rollbacks else 0.0


def _repeated_until(leg: Leg) -> int:
    """Last step that it is known to have repeated: the leg before may have got further than its log."""
    proof = leg.resumed
    return proof.last_step or 0 if proof is not None and proof.verdict == "exact" else 0


State = Literal["running", "finished", "stopped", "diverged", "failed", "died", "unknown"]

FINISHED = ("finished", "exhausted")
"""Reasons of legs after which nothing was left to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegSummary:
    """One leg, seen afterwards. Times are UTC seconds, steps are counts of finished optimizer steps."""

    leg: Leg
    """As ``run.json`` records it. A leg that was killed could not record its end: the log completes it below."""
    parent: int | None
    """Number of the leg whose checkpoint it resumed from; None if it started from scratch."""
    last_step: int
    """Last step known, by its records or because the next leg repeated it."""
    end_step: int
    """Last step known since its last rollback."""
    ended: float
    """For a leg that is running, or was killed: time of its last record."""
    reason: str | None
    """``finished``, ``stopped``, ``aborted``, ``exhausted``, ``exception``, ``interrupted``, ``died``; None while it
    runs; ``unknown`` if only another user may see whether it does."""
    redone: int = 0
    """Steps that the next leg repeated, because they came after the checkpoint it resumed from."""
    idle: float | None = None
    """Seconds from its end to the start of the next leg; None for the last leg."""
    cut_off: tuple[Tail, ...] = ()
    """Log tails that were cut off when this leg started, or by rollbacks within the previous leg."""


def summarize_legs(output_dir: Path, recorded: Sequence[Leg], tails: Sequence[Tail], clock: Series) -> list[LegSummary]:
    """The legs of the run in ``output_dir``.

    Args:
        recorded: at least one leg, as ``run.json`` has them.
        tails: tails that were cut off the run's log.
        clock: steps and times of the records in its log.
    """
    try:
        unrecorded = None if DirectoryLock.is_held(output_dir) else "died"
    except PermissionError:  # another user's run
        unrecorded = "unknown"
    lost = [tail.series("global_step") for tail in tails]
    own_times = np.full(len(clock), np.nan) if clock.times is None else clock.times
    times = np.concatenate([own_times, *(series.times for series in lost if series.times is not None)])
    steps = np.concatenate([clock.steps, *(series.steps for series in lost)])
    starts = [-float("inf"), *(leg.started for leg in recorded), float("inf")]
    legs: list[LegSummary] = []
    followers = [*recorded[1:], None]
    for leg, following, previous_start, next_start in zip(recorded, followers, starts, starts[2:], strict=False):
        own = (times >= leg.started) & (times < next_start)
        least = max(leg.last_step, 0 if following is None else _repeated_until(following))
        end_step = max(least, int(steps[own & (times > _rolled_back(leg))].max(initial=0)))
        ended = max(leg.started, float(times[own].max(initial=0))) if leg.ended is None else leg.ended
        legs.append(
            LegSummary(
                leg=leg,
                parent=_parent(leg, legs),
                last_step=max(least, int(steps[own].max(initial=0))),
                end_step=end_step,
                ended=ended,
                reason=leg.reason or (unrecorded if leg is recorded[-1] else "died"),
                redone=0 if following is None else max(0, end_step - following.first_step),
                idle=None if following is None else max(0.0, following.started - ended),
                cut_off=tuple(tail for tail in tails if previous_start <= tail.timestamp < leg.started),
            )
        )
    return legs


def find_restarts(legs: Sequence[LegSummary]) -> list[Restart]:
    """Every start of a leg after the first, and every rollback, in the order of time."""
    restarts = []
    for summary, following in zip_longest(legs, legs[1:]):
        leg = summary.leg
        restarts += [Restart(each["to_step"], each["from_step"], None, each["reason"]) for each in leg.rollbacks]
        if following is not None:
            begin, why = following.leg.first_step, (leg.cause or leg.why or "").partition("\n")[0]
            restarts.append(Restart(begin, begin + summary.redone, following.leg.leg, why or None))
    return restarts


def state_of(legs: Sequence[LegSummary], final: bool, last_loss_is_finite: bool) -> State:
    """State of a run. ``final``: whether its log has the record of a finished training."""
    if not legs:
        return "finished" if final else "unknown" if last_loss_is_finite else "diverged"
    last = legs[-1]
    if last.reason is None:
        return "running"
    if last.reason in ("stopped", "aborted"):
        leg = last.leg
        if leg.diverged or "diverge" in f"{leg.by or ''} {leg.why or ''}".lower():
            return "diverged"
    if last.reason in FINISHED:
        return "finished"
    states: dict[str, State] = {"exception": "failed", "died": "died", "unknown": "unknown"}
    return states.get(last.reason, "stopped")


def _parent(leg: Leg, earlier: Sequence[LegSummary]) -> int | None:
    """The latest earlier leg that passed the step at which ``leg`` resumed."""
    if leg.from_checkpoint is None:
        return None
    passed = [each.leg.leg for each in earlier if each.leg.first_step < leg.first_step <= each.last_step]
    return max(passed, default=earlier[-1].leg.leg if earlier else None)
