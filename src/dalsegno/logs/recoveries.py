"""RecoveryFile: ``recoveries.jsonl``, which records the rollbacks of a run.

A rollback is part of the run, and outside of the state that goes back: a leg that resumes, from whatever checkpoint,
skips the same data, applies the same factors to the learning rate and counts the same budget. The kinds of lines, which
are only appended, each on disk before the run does anything else:

* ``decided``: all ranks have agreed to go back, from which step to which checkpoint, why, and by which settings. If the
  process is killed after this line, the next leg completes the rollback;
* ``done``: the checkpoint that was restored, and its place in the data;
* ``dropped``: the rollback did not take place, and why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dalsegno.stateful.schema import Count, Must

from .line_file import LineFile, parser_of

RECOVERIES = "recoveries.jsonl"

DataPlace = Annotated[list[Count], Must("an epoch and a count", lambda place: len(place) == 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A rollback. Steps are numbers of finished optimizer steps; a place in the data is an epoch and what was consumed
    of it, in samples or micro-batches."""

    number: int
    """From 1."""
    timestamp: float
    """When it was decided, in UTC seconds."""
    at_step: int
    """The step at whose end the run went back."""
    to_step: int
    """Step of the checkpoint that was restored, or is to be."""
    reason: str
    by: str
    """Who asked for it: a callback's key."""
    until: tuple[int, int] | None
    """Where the skipped data ends; None: none is skipped."""
    lr_factor: float
    lr_steps: int | None
    """Steps after ``to_step`` to which ``lr_factor`` applies; None: all."""
    since: tuple[int, int] | None = None
    """Where the skipped data begins: at the checkpoint's place."""
    is_done: bool = False

    def lr_factor_at(self, step: int) -> float:
        """Factor of the learning rate that the update from ``step`` to the next step uses."""
        is_over = self.lr_steps is not None and step >= self.to_step + self.lr_steps
        return 1.0 if step < self.to_step or is_over or not self.is_done else self.lr_factor


class _Decided(TypedDict):
    number: Count
    timestamp: float
    at_step: Count
    to_step: Count
    reason: str
    by: str
    until: DataPlace | None
    lr_factor: float
    lr_steps: Count | None


class _Done(TypedDict):
    number: Count
    timestamp: float
    to_step: Count
    since: DataPlace


class _Dropped(TypedDict):
    number: Count
    timestamp: float
    error: str


_FORMS: Mapping[str, Any] = {"decided": _Decided, "done": _Done, "dropped": _Dropped}


class RecoveryFile:
    """``recoveries.jsonl`` of an ``output_dir``. Written by rank 0 of the run that holds the directory's lock.

    The methods that write raise OSError, say on a full disk; no part of their lines stays in the file then.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self._file = LineFile(Path(output_dir) / RECOVERIES, parser_of(_FORMS))
        self.path = self._file.path

    def read(self) -> list[Recovery]:
        """Return the rollbacks in the order of their decision; only the last one may not be done.

        Raises:
            StateMismatch: for a damaged line other than a torn last one: the run could not skip the same data again.
        """
        found: dict[int, Recovery] = {}
        for kind, line in self._file.read(strict=True):
            number = line["number"]
            if kind == "decided":
                found[number] = Recovery(**line | {"until": _place(line["until"])})
            elif kind == "dropped":
                found.pop(number, None)
            elif number in found:
                found[number] = replace(
                    found[number], to_step=line["to_step"], since=_place(line["since"]), is_done=True
                )
        return [*found.values()]

    def decide(self, recovery: Recovery) -> None:
        """Record that all ranks have agreed to go back."""
        values = {name: getattr(recovery, name) for name in _Decided.__annotations__}
        self._file.append([{"kind": "decided", **values}])

    def complete(self, recovery: Recovery) -> None:
        """Record that the checkpoint is restored."""
        self._append("done", recovery, to_step=recovery.to_step, since=recovery.since)

    def drop(self, recovery: Recovery, error: str) -> None:
        """Record that a rollback which was decided does not take place."""
        self._append("dropped", recovery, error=error)

    def _append(self, kind: str, recovery: Recovery, **values: Any) -> None:
        self._file.append([{"kind": kind, "number": recovery.number, "timestamp": time.time(), **values}])


def _place(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])
