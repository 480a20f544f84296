"""run.json: which run an ``output_dir`` holds, and through which process lives it has gone."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dalsegno.errors import DamagedRunFile, StateMismatch
from dalsegno.stateful.schema import Must, check
from dalsegno.system import filesystem

from .values import from_json, to_json

logger = logging.getLogger("dalsegno")

FORMAT = 1


Goal = Annotated[dict[str, float], Must("max_steps and num_train_epochs", {"max_steps", "num_train_epochs"}.issubset)]


@dataclass(kw_only=True, slots=True)
class Leg:
    """One process life of a run. Times are UTC seconds, steps are counts of finished optimizer steps."""

    leg: int
    """From 1."""
    started: float
    ended: float | None = None
    """None while it lives, and for ever if it was killed."""
    from_checkpoint: str | None
    """The checkpoint it went on from, relative to ``output_dir``; None if it began at the beginning."""
    world_size: int
    host: str
    pid: int
    first_step: int
    last_step: int
    """Of the last checkpoint, or at the end if it came to one."""
    reason: str | None = None
    """Why it ended; ``died`` if it could not say; None while it lives."""
    by: str | None = None
    """Who asked it to end: a callback's key, a signal."""
    why: str | None = None
    """In words: what was asked for, or the error it ended with."""
    metrics: dict[str, Any] = field(default_factory=dict)
    goal_given_up: Goal | None = None
    """Where a callback judged the training to be over: ``max_steps`` and ``num_train_epochs`` as they were. The run has
    ended there, unless one of them is raised."""

    def has_given_up(self, max_steps: int, num_train_epochs: float) -> bool:
        """Whether the run has ended here, and is to go no further than it was to go then."""
        goal = self.goal_given_up
        return goal is not None and max_steps <= goal["max_steps"] and num_train_epochs <= goal["num_train_epochs"]


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """What ``run.json`` holds."""

    run_id: str
    created: float
    legs: list[Leg] = field(default_factory=list)


class RunFile:
    """``run.json`` of one ``output_dir``: replaced whole at each change, so that it is valid at every moment.

    Only one process may write it: rank 0 of the run that holds the directory's lock.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(output_dir) / "run.json"
        self._run: RunRecord | None = None  # as it was written last

    def load(self) -> RunRecord | None:
        """The run so far; None before its first leg.

        Raises:
            DamagedRunFile: if the file is damaged.
            StateMismatch: if it is of a newer format.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return _parse(data, self.path)

    def last_leg(self) -> Leg | None:
        """The newest; None where none is known, also of a damaged file, which the next leg replaces.

        Raises:
            StateMismatch: if the file is of a newer format.
        """
        try:
            record = self.load()
        except DamagedRunFile:
            return None
        return record.legs[-1] if record is not None and record.legs else None

    def begin(self, from_checkpoint: str | None, world_size: int, first_step: int) -> RunRecord:
        """Append a leg that starts now, after ``first_step`` steps. A former leg still open has died."""
        run = self._load_or_renew()
        for leg in run.legs:
            leg.reason = leg.reason or "died"
        run.legs.append(
            Leg(
                leg=len(run.legs) + 1,
                started=time.time(),
                from_checkpoint=from_checkpoint,
                world_size=world_size,
                host=os.uname().nodename,
                pid=os.getpid(),
                first_step=first_step,
                last_step=first_step,
            )
        )
        self._write(run)
        return run

    def progress(self, last_step: int) -> None:
        """Note that a checkpoint of ``last_step`` is published, so that a leg that dies later has said so."""
        run = self._current()
        run.legs[-1].last_step = last_step
        self._write(run)

    def end(
        self,
        reason: str,
        by: str | None,
        last_step: int,
        metrics: Mapping[str, Any],
        why: str | None = None,
        goal_given_up: dict[str, float] | None = None,
    ) -> None:
        """Close the present leg."""
        run = self._current()
        leg = run.legs[-1]
        leg.ended, leg.reason, leg.by, leg.why = time.time(), reason, by, why
        leg.last_step, leg.metrics, leg.goal_given_up = last_step, dict(metrics), goal_given_up
        self._write(run)

    def _current(self) -> RunRecord:
        """As the file says; as this leg knew it last, if the file was removed or damaged while the run lives."""
        try:
            run = self.load()
        except DamagedRunFile:
            run = None
        if self._run is not None and (run is None or not run.legs):
            logger.warning("%s was removed or damaged while the run lives; it is written anew", self.path)
            run = self._run
        if run is None or not run.legs:
            raise StateMismatch(f"{self.path}: no leg has begun")
        return run

    def _load_or_renew(self) -> RunRecord:
        """The run so far, or a new one; a file that cannot be read is moved aside first."""
        try:
            run = self.load()
        except DamagedRunFile as error:
            aside = filesystem.numbered(self.path.parent, self.path.name)
            filesystem.rename(self.path, aside)
            logger.warning("%s; it is now %s, and the list of legs starts anew", error, aside.name)
            run = None
        return run or RunRecord(run_id=os.urandom(8).hex(), created=time.time())

    def _write(self, run: RunRecord) -> None:
        self._run = run
        data = {"format": FORMAT, **to_json(dataclasses.asdict(run))}
        filesystem.replace_durably(self.path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())


def _known(kind: type[Leg | RunRecord], content: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a newer version of the same format may have added."""
    return {field.name: content[field.name] for field in dataclasses.fields(kind) if field.name in content}


def _parse(data: bytes, path: Path) -> RunRecord:
    try:
        content = from_json(json.loads(data))
        number = content.pop("format")
        if isinstance(number, int) and number > FORMAT:
            raise StateMismatch(f"{path}: format {number} is newer than {FORMAT}; use the dalsegno that wrote it")
        run = _known(RunRecord, content) | {"legs": [_known(Leg, leg) for leg in content["legs"]]}
    except StateMismatch:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedRunFile(f"{path}: damaged ({error})") from error
    check(run, RunRecord, f"{path}: damaged", DamagedRunFile)
    return RunRecord(**run | {"legs": [Leg(**leg) for leg in run["legs"]]})
