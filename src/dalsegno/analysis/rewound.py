"""Restarts and rollbacks of a run, and the log tails that were cut off by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dalsegno.logs import Leg, ReadReport, read_records
from dalsegno.logs.formats import numbered
from dalsegno.logs.values import Record

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
        return _number(self.records[-1].get("timestamp"))

    def series(self, metric: str) -> Series:
        """A metric in the cut-off records; empty if they do not have it."""
        records = [record for record in self.records if isinstance(record.get(metric), (int, float))]
        return Series(
            name=metric,
            run=self.path.name,
            steps=np.array([record["global_step"] for record in records], np.int64),
            values=np.array([record[metric] for record in records], np.float64),
            epochs=np.array([_number(record.get("epoch")) for record in records], np.float64),
            times=np.array([_number(record.get("timestamp")) for record in records], np.float64),
        )


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart in a new process, or a rollback. Steps are counts of finished optimizer steps."""

    step: int
    """Step it resumed from: the checkpoint's step; for a rollback, the step before the first repeated one."""
    reached: int
    """Last step in the log before it; the steps after ``step`` were repeated. Equal to ``step`` if there were none."""
    leg: int | None
    """Number of the leg that started, from 2; None for a rollback within a leg."""
    reason: str | None = None
    """Why the run was taken back, if ``run.json`` records it."""

    @property
    def redone(self) -> int:
        return self.reached - self.step


def read_tails(log: Path) -> list[Tail]:
    """The archived tails of a log file, oldest first, after those of the files that the log continues
    (``train.jsonl`` for ``train-2.jsonl``). Tails without a record with a step are left out."""
    tails = []
    for path in _archived(log):
        records = [record for record in read_records(path, ReadReport()) if isinstance(record.get("global_step"), int)]
        if records:
            tails.append(Tail(path, tuple(records)))
    return tails


def _archived(log: Path) -> list[Path]:
    stem, number = numbered(log.stem)
    found = []
    for path in (log.parent / "rewound").glob(f"*{log.suffix}.*"):
        name, _, place = path.name.rpartition(".")
        its_stem, its_number = numbered(name.removesuffix(log.suffix))
        if its_stem == stem and its_number <= number:
            found.append((its_number, place, path))
    return [path for *_, path in sorted(found)]


def find_restarts(legs: Sequence[Leg], tails: Sequence[Tail]) -> list[Restart]:
    """Every start of a leg after the first, and every rollback, in the order of time.

    A tail belongs to the leg during which its last record was logged. If the last tail of a leg has only records of the
    step from which the next leg resumed and of later ones, logged after the last rollback, the next leg cut this tail
    off (if the leg was stopped, its final record). Every other tail was cut off by a rollback, of which ``run.json``
    may know more.
    """
    restarts = []
    for index, leg in enumerate(legs):
        following = legs[index + 1] if index + 1 < len(legs) else None
        until = following.started if following is not None else float("inf")
        own = [tail for tail in tails if leg.started <= tail.timestamp < until]
        rolled_back = leg.rollbacks[-1]["timestamp"] if leg.rollbacks else 0.0
        went_back = (
            own
            and following is not None
            and following.first_step <= own[-1].first_step
            and own[-1].timestamp > rolled_back
        )
        cut_by_restart = own.pop() if went_back else None
        recorded = [Restart(each["to_step"], each["from_step"], None, each["reason"]) for each in leg.rollbacks]
        restarts += recorded or [Restart(max(0, tail.first_step - 1), tail.last_step, None) for tail in own]
        if following is not None:
            step = following.first_step
            reached = max(step, cut_by_restart.last_step) if cut_by_restart is not None else step
            restarts.append(Restart(step, reached, following.leg))
    return restarts


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
