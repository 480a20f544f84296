"""RollbackDecisions: decide to go back to a checkpoint, on all ranks together, and record it before anything changes.

::

    decide     which checkpoint, and what is skipped; one line in recoveries.jsonl, which commits the decision
    restore    later checkpoints move into rewound/, the checkpoint is restored: RunLifecycle
    complete   run.json, then a second line, with the checkpoint's place in the data

A leg that is killed before the first line repeats the step, and decides the same. One that is killed between the two
lines is completed by the next leg, as it begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dalsegno.checkpoint import Checkpoint
from dalsegno.data.skipped_data import Place
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.logs import RunFile
from dalsegno.logs.line_file import LineFile, parser_of
from dalsegno.logs.run_file import RolledBack
from dalsegno.policies.recovery import RecoveryPolicy, Rollback, RollbackRequest, recovery_of
from dalsegno.state import ControlRequests
from dalsegno.stateful.schema import Count, Must
from dalsegno.system import filesystem

from .checkpoint_sources import CheckpointSources
from .full_disk import expect_room
from .rollback_effects import check_has_rates
from .run_parts import RunParts

logger = logging.getLogger("dalsegno")

_NO_WAY_BACK = "without it the run cannot go back. Started again, it resumes from its newest checkpoint"


class RollbackDecisions:
    """All methods are collective."""

    def __init__(self, parts: RunParts, checkpoints: CheckpointSources, run_file: RunFile) -> None:
        self._parts = parts
        self._policy = recovery_of(parts.args.recovery)
        self._state = parts.state
        self._effects = parts.rollback_effects
        self._checkpoints = checkpoints
        self._file = RollbackFile(parts.args.directory)
        self._run_file = run_file
        self._set_aside: Rollback | None = None  # pending, until another beginning is restored

    def begin_leg(self) -> None:
        """Read the rollbacks of earlier legs, and put in force what they left."""
        if self._policy is not None and self._policy.lr_factor != 1:
            check_has_rates(self._parts.optimizer)
        self._set_aside = None
        self._effects.set(collectives.from_rank_zero(self._file.read))

    def decide(self, *, may_save: bool) -> Rollback | ControlRequests:
        """Choose the checkpoint for the request of the lowest rank that has one, record the decision, and return it; or
        the request to end the leg, if the budget is used up or there is no checkpoint.

        ``may_save``: the leg may end with a checkpoint of this step.
        """
        requests = collectives.gather(self._parts.control.rollback_request, "why the run rolls back")
        request = next(each for each in requests if each is not None)
        policy, step = self._policy, self._state.global_step
        assert policy is not None, "roll_back() raises without a policy"
        if budget := policy.used_up(step, self._effects.rollbacks):
            return self._give_up(request, f"{budget} is used up", may_save)
        checkpoint = self._checkpoint(request, policy, step)
        if checkpoint is None:
            return self._give_up(request, "no valid checkpoint to go back to is left", may_save)
        skip = policy.skip if request.skip == "policy" else request.skip
        microbatches = (skip or 0) * self._parts.args.accumulation.at(step)
        rollback = Rollback(
            number=len(self._effects.rollbacks) + 1,
            timestamp=time.time(),
            at_step=step,
            to_step=checkpoint.step,
            reason=request.reason,
            by=request.by,
            until=None if skip is None else self._furthest(self._parts.loader.place_after(microbatches)),
            lr_factor=float(policy.lr_factor),
            lr_steps=policy.lr_steps,
        )
        self._write((self._file.path, lambda: self._file.decide(rollback)))
        self._effects.set([*self._effects.rollbacks, rollback])
        if collectives.rank() == 0:
            text = "step %d: rolling back to step %d, requested by %s: %s"
            logger.warning(text, step, rollback.to_step, rollback.by, rollback.reason)
        return rollback

    def complete(self) -> None:
        """Record that the pending rollback, if any, is done: its checkpoint, or the run's beginning, is restored."""
        if self._effects.pending is None:
            return
        *earlier, pending = self._effects.rollbacks
        done = replace(
            pending, to_step=self._state.global_step, since=self._furthest(self._parts.loader.place), is_done=True
        )
        line = RolledBack(
            timestamp=done.timestamp, from_step=done.at_step, to_step=done.to_step, by=done.by, reason=done.reason
        )
        self._write(
            (self._run_file.path, lambda: self._run_file.roll_back(line)),
            (self._file.path, lambda: self._file.complete(done)),
        )
        self._effects.set([*earlier, done])

    def set_aside(self) -> None:
        """Leave the pending rollback out of this leg. It stays pending for the next one, until :meth:`drop`."""
        *earlier, self._set_aside = self._effects.rollbacks
        self._effects.set(earlier)

    def drop(self, why: str) -> None:
        """Record that the rollback that was set aside, if any, does not take place."""
        pending, self._set_aside = self._set_aside, None
        if pending is not None:
            self._write((self._file.path, lambda: self._file.drop(pending, why)))

    def archive(self, place: Path) -> None:
        """Move the record of an abandoned timeline's rollbacks into the directory ``place``: none is in force."""

        def move() -> None:
            if self._file.path.exists():
                filesystem.make_directory(place)
                filesystem.rename(self._file.path, place / self._file.path.name)

        collectives.from_rank_zero(move)
        self._set_aside = None
        self._effects.set([])

    def _checkpoint(self, request: RollbackRequest, policy: RecoveryPolicy, step: int) -> Checkpoint | None:
        """The checkpoint to go back to; one from which the run came here before, if none is older."""
        if request.to is not None:
            return self._checkpoints.newest_until(min(request.to, step - 1))
        if request.steps is not None:
            policy = replace(policy, margin=request.steps)
        older = self._checkpoints.newest_until(policy.latest_checkpoint(step, self._effects.rollbacks))
        return older or self._checkpoints.newest_until(policy.latest_checkpoint(step, ()))

    def _give_up(self, request: RollbackRequest, why: str, may_save: bool) -> ControlRequests:
        save = (
            may_save
            and self._policy is not None
            and self._policy.when_used_up == "stop"
            and are_finite(self._parts.model)
        )
        self._parts.control.rollback_request = None
        self._parts.control.stop(f"{request.reason}; {why}", save=save, diverged=True, by=request.by)
        return ControlRequests(stop=save, abort=not save)

    def _furthest(self, place: Place) -> Place:
        """The furthest of all ranks' places: ranks with a loader of their own may have finished an epoch earlier."""
        return max(collectives.gather(place, "where the data are")) if not self._parts.loader.lockstep else place

    def _write(self, *writes: tuple[Path, Callable[[], None]]) -> None:
        def on_rank_zero() -> None:
            for path, write in writes:
                with expect_room(path, _NO_WAY_BACK):
                    write()

        collectives.from_rank_zero(on_rank_zero)


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


class RollbackFile:
    """``recoveries.jsonl`` of an ``output_dir``. Written by rank 0 of the run that holds the directory's lock.

    A rollback is part of the run, and outside of the state that goes back: a leg that resumes, from whatever
    checkpoint, skips the same data, applies the same factors to the learning rate and counts the same budget. The kinds
    of lines, which are only appended, each on disk before the run does anything else:

    * ``decided``: all ranks have agreed to go back, from which step to which checkpoint, why, and by which settings. If
      the process is killed after this line, the next leg completes the rollback;
    * ``done``: the checkpoint that was restored, and its place in the data;
    * ``dropped``: the rollback did not take place, and why.

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
        values = {name: getattr(rollback, name) for name in _Decided.__annotations__}
        self._file.append([{"kind": "decided", **values}])

    def complete(self, rollback: Rollback) -> None:
        self._append("done", rollback, to_step=rollback.to_step, since=rollback.since)

    def drop(self, rollback: Rollback, error: str) -> None:
        self._append("dropped", rollback, error=error)

    def _append(self, kind: str, rollback: Rollback, **values: Any) -> None:
        self._file.append([{"kind": kind, "number": rollback.number, "timestamp": time.time(), **values}])


def _place(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])
