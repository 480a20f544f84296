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
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dalsegno.policies.recovery import Rollback
from dalsegno.stateful.schema import Count, Must

from .line_file import LineFile, parser_of

RECOVERIES = "recoveries.jsonl"

DataPlace = Annotated[list[Count], Must("an epoch and a count", lambda place: len(place) == 2)]


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

    def read(self) -> list[Rollback]:
        """Return the rollbacks in the order of their decision; only the last one may not be done. Raises StateMismatch
        for a damaged line other than a torn last one: the run could not skip the same data again.
        """
        found: dict[int, Rollback] = {}
        for kind, line in self._file.read(strict=True):
            number = line["number"]
            if kind == "decided":
                found[number] = Rollback(**line | {"until": _place(line["until"])})
            elif kind == "dropped":
                found.pop(number, None)
            elif number in found:
                found[number] = replace(
                    found[number], to_step=line["to_step"], since=_place(line["since"]), is_done=True
                )
        return [*found.values()]

    def decide(self, rollback: Rollback) -> None:
        """Record that all ranks have agreed to go back."""
        values = {name: getattr(rollback, name) for name in _Decided.__annotations__}
        self._file.append([{"kind": "decided", **values}])

    def complete(self, rollback: Rollback) -> None:
        """Record that the checkpoint is restored."""
        self._append("done", rollback, to_step=rollback.to_step, since=rollback.since)

    def drop(self, rollback: Rollback, error: str) -> None:
        """Record that a rollback which was decided does not take place."""
        self._append("dropped", rollback, error=error)

    def _append(self, kind: str, rollback: Rollback, **values: Any) -> None:
        self._file.append([{"kind": kind, "number": rollback.number, "timestamp": time.time(), **values}])


def _place(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])
