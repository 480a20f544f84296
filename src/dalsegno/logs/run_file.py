"""RunFile: run.json, which identifies the run of an ``output_dir`` and lists its legs.

A killed process cannot record its end. The launcher that restarts it passes what it knows as PreviousLeg, in the
environment of the next leg, which writes it into run.json.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypedDict

from dalsegno.errors import DamagedRunFile, StateMismatch
from dalsegno.state import ResumeProof
from dalsegno.stateful.schema import Count, Must, check
from dalsegno.system import filesystem
from dalsegno.system.machine import host_name

from .values import from_json, to_json

_VARIABLE = "DALSEGNO_PREVIOUS_LEG"


@dataclass(frozen=True, slots=True)
class PreviousLeg:
    """The end of a leg, identified by the process of its rank 0."""

    host: str
    pid: int
    cause: str
    """In words: ``rank 1 was killed by SIGKILL``."""

    def to_environment(self) -> dict[str, str]:
        """The environment variable for the processes of the next leg."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None without a launcher, in the first leg of a launch, or if the variable has another content."""
        try:
            return cls(**json.loads(environment[_VARIABLE]))
        except (KeyError, ValueError, TypeError):
            return None


logger = logging.getLogger("dalsegno")

FORMAT = 1

_NUMBERS = ("metrics", "goal_given_up")
"""Fields of a leg with numbers that may be NaN or infinite. A text of that spelling stays one in the others."""

_FAILED = (None, "exception", "interrupted")  # reasons of legs that did not end by themselves

Goal = Annotated[dict[str, float], Must("max_steps and num_train_epochs", {"max_steps", "num_train_epochs"}.issubset)]


class RolledBack(TypedDict):
    """A return to a checkpoint within a leg. Steps are numbers of finished optimizer steps."""

    timestamp: float
    """When it was decided, in UTC seconds."""
    from_step: int
    to_step: int
    by: str
    reason: str


@dataclass(kw_only=True, slots=True)
class Leg:
    """One process life of a run. Times are UTC seconds, steps are numbers of finished optimizer steps."""

    leg: int
    """From 1."""
    started: float
    ended: float | None = None
    """None while the leg is running, and permanently if it was killed."""
    from_checkpoint: str | None
    """The checkpoint that it resumed from, relative to ``output_dir`` unless it was in shared memory; None if it
    started from scratch."""
    world_size: int
    parallel: str | list[str] | None = None
    """The ``parallel`` setting, as text; a list if several modes are composed."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Number of ranks in each dimension of the mesh, by name; empty if every rank has the whole model."""
    memory: str | None = None
    """Name of the directory of its memory checkpoints, on its host; None if it had none. Only the last leg's is in
    force."""
    host: str
    pid: int
    first_step: int
    last_step: int
    """Step of the last checkpoint; after a regular end, the last step."""
    reason: str | None = None
    """Why it ended; ``died`` if it was killed; None while it is running."""
    by: str | None = None
    """Who requested the end: a callback's key, a signal."""
    why: str | None = None
    """The requester's reason, or the error that ended it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    goal_given_up: Goal | None = None
    """``max_steps`` and ``num_train_epochs`` at the time when a callback judged training to be complete, in this leg or
    in one that was killed before its end. The run stays ended until one of them is raised."""
    diverged: bool = False
    """Whether a callback judged that training has diverged."""
    cause: str | None = None
    """Why it died or failed, as the launcher that started the next leg found out: ``rank 1 was killed by SIGKILL``."""

    changed: list[str] = field(default_factory=list)
    """Settings that differ from those of the checkpoint, in words: ``learning_rate: saved 0.01, now 0.02 (…)``."""
    lost_records: Count = 0
    """Records of its logs that a checkpoint counts and its beginning found missing, or that it could not write."""

    rollbacks: list[RolledBack] = field(default_factory=list)
    """Each return to a checkpoint within the leg."""
    resumed: ResumeProof | None = None
    """Whether the steps that it repeated were those of the leg before; None if it did not resume, or ended before that
    was known."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Content of ``run.json``."""

    run_id: str
    created: float
    legs: list[Leg] = field(default_factory=list)


class RunFile:
    """``run.json`` of an ``output_dir``: replaced atomically at each change, so that it is always valid.

    Only one process may write it: rank 0 of the run that holds the directory's lock.
    """

    lost: ClassVar[Counter[Path]] = Counter()
    """Records that logs have lost, by ``output_dir``: counted with the file's next change, as the disk may be full."""

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(output_dir) / "run.json"
        self._run: RunRecord | None = None  # as last written
        self._changing = threading.Lock()  # a save that is published records that on its own thread

    def load(self) -> RunRecord | None:
        """Return the run so far; None before its first leg. Raises DamagedRunFile if the file is damaged; StateMismatch
        if its format is newer.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return _parse(data, self.path)

    def legs(self) -> list[Leg]:
        """Return all legs so far. Raises DamagedRunFile, StateMismatch as :meth:`load` does."""
        run = self.load()
        return [] if run is None else run.legs

    def last_leg(self) -> Leg | None:
        """Return the newest leg; None if there is none, or the file is damaged (the next leg replaces it). Raises
        StateMismatch if the file's format is newer.
        """
        run = self._undamaged()
        return run.legs[-1] if run and run.legs else None

    def withdraw_end(self) -> bool:
        """Make the newest leg one that has not ended, say in a copy beside logs that lack its last records. Returns
        whether it had ended; False if the file is damaged."""
        run = self._undamaged()
        if run is None or not run.legs or run.legs[-1].ended is None:
            return False
        leg = run.legs[-1]
        leg.ended = leg.reason = leg.by = leg.why = None
        leg.metrics, leg.diverged = {}, False
        self._write(run)
        return True

    def begin(
        self,
        from_checkpoint: str | None,
        world_size: int,
        first_step: int,
        previous: PreviousLeg | None = None,
        *,
        parallel: str | list[str] | None = None,
        mesh: Mapping[str, int] | None = None,
        memory: str | None = None,
        goal_given_up: Goal | None = None,
        changed: Sequence[str] = (),
    ) -> RunRecord:
        """Append a leg that starts now, after ``first_step`` steps. Earlier legs without an end are marked ``died``.

        The arguments are fields of :class:`Leg`, but for ``previous``: what the launcher knows about the end of the leg
        before. ``goal_given_up`` is given for a leg that does not train, but only ends the run.
        """
        run = self._load_or_renew()
        last = run.legs[-1] if run.legs else None
        if last and previous and (last.host, last.pid) == (previous.host, previous.pid) and last.reason in _FAILED:
            last.cause = previous.cause
        for leg in run.legs:
            leg.reason = leg.reason or "died"
        run.legs.append(
            Leg(
                leg=len(run.legs) + 1,
                started=time.time(),
                from_checkpoint=from_checkpoint,
                world_size=world_size,
                parallel=parallel,
                mesh=dict(mesh or {}),
                memory=memory,
                host=host_name(),
                pid=os.getpid(),
                first_step=first_step,
                last_step=first_step,
                goal_given_up=goal_given_up,
                changed=[*changed],
            )
        )
        self._write(run)
        return run

    def progress(self, last_step: int) -> None:
        """Record that a checkpoint of ``last_step`` is published, in case the leg is killed later."""
        with self._changing:
            run = self._current()
            run.legs[-1].last_step = last_step
            self._write(run)

    def roll_back(self, rollback: RolledBack) -> None:
        """Record a rollback of the newest leg, which may have been killed during it; once, however often called. If no
        leg is known, because the file of an earlier process was removed or damaged, there is nothing to record."""
        with self._changing:
            if (run := self._newest()) is not None and rollback not in run.legs[-1].rollbacks:
                run.legs[-1].rollbacks.append(rollback)
                run.legs[-1].last_step = rollback["to_step"]
                self._write(run)

    def prove(self, proof: ResumeProof) -> None:
        """Record whether the newest leg resumed exactly."""
        with self._changing:
            if (run := self._newest()) is not None and run.legs[-1].resumed != proof:
                run.legs[-1].resumed = proof
                self._write(run)

    def end(
        self,
        reason: str,
        by: str | None,
        last_step: int,
        metrics: Mapping[str, Any],
        why: str | None = None,
        goal_given_up: Goal | None = None,
        *,
        diverged: bool = False,
    ) -> None:
        """Record the end of the current leg."""
        with self._changing:
            run = self._current()
            leg = run.legs[-1]
            leg.ended, leg.reason, leg.by, leg.why = time.time(), reason, by, why
            leg.last_step, leg.metrics, leg.goal_given_up = last_step, dict(metrics), goal_given_up
            leg.diverged = diverged
            self._write(run)

    def _current(self) -> RunRecord:
        """Raises StateMismatch if no leg has started."""
        run = self._newest()
        if run is None:
            raise StateMismatch(f"{self.path}: no leg has started")
        return run

    def _newest(self) -> RunRecord | None:
        """Return the file's content; if it was removed or damaged during this leg, what this leg wrote last; None if
        there is no leg in either."""
        run = self._undamaged()
        if self._run is not None and (run is None or not run.legs):
            logger.warning("%s was removed or damaged during the run; writing it again", self.path)
            run = self._run
        return run if run is not None and run.legs else None

    def _undamaged(self) -> RunRecord | None:
        try:
            return self.load()
        except DamagedRunFile:
            return None

    def _load_or_renew(self) -> RunRecord:
        """Return the run so far, or a new one; an unreadable file is first moved aside."""
        try:
            run = self.load()
        except DamagedRunFile as error:
            aside = filesystem.numbered(self.path.parent, self.path.name)
            filesystem.rename(self.path, aside)
            logger.warning("%s; moved it to %s and started a new list of legs", error, aside.name)
            run = None
        return run or RunRecord(run_id=os.urandom(8).hex(), created=time.time())

    def _write(self, run: RunRecord) -> None:
        lost = self.lost[self.path.parent]
        run.legs[-1].lost_records += lost
        self._run = run
        data = {"format": FORMAT, **to_json(dataclasses.asdict(run))}
        filesystem.replace_durably(self.path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())
        self.lost[self.path.parent] -= lost


def _known_fields(kind: type[Leg | RunRecord | ResumeProof], content: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that a newer version of the same format may have added."""
    return {field.name: content[field.name] for field in dataclasses.fields(kind) if field.name in content}


def _leg(content: Mapping[str, Any]) -> dict[str, Any]:
    fields = _known_fields(Leg, content)
    if fields.get("resumed") is not None:
        fields["resumed"] = _known_fields(ResumeProof, fields["resumed"])
    return {name: from_json(value) if name in _NUMBERS else value for name, value in fields.items()}


def _parse(data: bytes, path: Path) -> RunRecord:
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise TypeError("it is not a JSON object")
        number = content.pop("format")
        if isinstance(number, int) and number > FORMAT:
            raise StateMismatch(f"{path}: format {number} is newer than {FORMAT}; use the dalsegno that wrote it")
        run = _known_fields(RunRecord, content) | {"legs": [_leg(leg) for leg in content["legs"]]}
    except StateMismatch:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedRunFile(f"{path}: damaged ({error})") from error
    record: RunRecord = check(run, RunRecord, f"{path}: damaged", DamagedRunFile)
    return record
