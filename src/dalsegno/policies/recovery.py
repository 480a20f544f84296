"""RecoveryPolicy: what a run does when a callback requests a rollback. Pure functions of steps; reads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dalsegno.errors import ConfigurationError
from dalsegno.stateful.annotations import check_types

from . import Policy, check_integers, read_policies
from .retention import CheckpointSummary, Retention


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A callback's request to go back to a checkpoint.

    Args:
        reason: human-readable; recorded in ``recoveries.jsonl``.
        by: key of the callback, or ``the program``.
        steps: go back by at least this many steps, instead of the policy's ``margin``.
        to: go back to the newest checkpoint of this step or before, whatever happened there.
        skip: data to skip, instead of the policy's ``skip``.

    Raises:
        ConfigurationError: for an invalid value, or both ``steps`` and ``to``.
    """

    reason: str
    by: str
    steps: int | None = None
    to: int | None = None
    skip: int | Literal["policy"] | None = "policy"

    def __post_init__(self) -> None:
        if self.steps is not None and self.to is not None:
            raise ConfigurationError(f"roll_back(steps={self.steps!r}, to={self.to!r}): give only one of them")
        least = {"steps": 1, "to": 0} | ({} if self.skip == "policy" else {"skip": 0})
        check_integers("roll_back", self, least, *least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A rollback of the run, decided or done. Steps are numbers of finished optimizer steps; a place in the data is an
    epoch, and what was consumed of it, in samples or micro-batches."""

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


@check_types
@dataclass(frozen=True, slots=True, repr=False)
class RecoveryPolicy(Policy):
    """How a run recovers from a divergence, when a callback calls ``ctx.control.roll_back()``.

    The run goes back to its newest verified checkpoint of at least ``margin`` steps ago. If it went back from the same
    place before, the checkpoint is an older one than then. It continues after the data that led to the divergence, at
    a reduced learning rate, for a limited number of times.

    Args:
        margin: steps between the checkpoint and the step at which the callback noticed. A divergence begins before it
            is noticed: at least the steps between two records, times the patience of the detector.
        skip: data to skip, beyond that between the checkpoint and the step: the data of this many steps. None: skip
            nothing, and train on the same data again.
        lr_factor: factor of the learning rate after a rollback, 0 < f ≤ 1. Factors of several rollbacks multiply.
        lr_steps: number of steps after the checkpoint to which the factor applies; None: the rest of the run.
        budget: number of rollbacks after which the next request ends the run.
        window: the budget counts only rollbacks of the last so many steps; None: of the whole run.
        when_used_up: how the run then ends: ``"stop"`` saves a checkpoint first, unless the weights are NaN or
            infinite; ``"abort"`` does not. The exit status is 3 either way.
        run_budget: with a ``window``, a second limit: number of rollbacks in the whole run after which the next request
            ends it; None: none.

    Raises:
        ConfigurationError: for an invalid value, or a ``run_budget`` without a ``window``.
    """

    margin: int = 50
    skip: int | None = 0
    lr_factor: float = 1.0
    lr_steps: int | None = None
    budget: int = 3
    window: int | None = None
    when_used_up: Literal["stop", "abort"] = "stop"
    run_budget: int | None = None

    def __post_init__(self) -> None:
        least = {"margin": 1, "skip": 0, "lr_steps": 1, "budget": 1, "window": 1, "run_budget": 1}
        check_integers("RecoveryPolicy", self, least, "skip", "lr_steps", "window", "run_budget")
        if self.run_budget is not None and self.window is None:
            raise ConfigurationError("RecoveryPolicy(run_budget=…): without window=, budget= counts the whole run")
        if not 0 < self.lr_factor <= 1:
            raise ConfigurationError(f"RecoveryPolicy(lr_factor={self.lr_factor!r}): needs a number over 0, at most 1")

    def used_up(self, step: int, past: Sequence[Rollback]) -> str | None:
        """Return which limit a request at ``step`` exceeds: ``the budget of …``; None: it exceeds none."""
        window = math.inf if self.window is None else self.window
        if sum(abs(step - each.at_step) < window for each in past) >= self.budget:
            return f"the budget of {self.budget} rollbacks{f' within {self.window} steps' if self.window else ''}"
        if self.run_budget is not None and len(past) >= self.run_budget:
            return f"the budget of {self.run_budget} rollbacks in the run"
        return None

    def latest_checkpoint(self, step: int, past: Iterable[Rollback]) -> int:
        """Highest step of a checkpoint to which a request at ``step`` goes back: at least 0, the run's beginning.

        A request up to ``margin`` steps after an earlier one, and after the checkpoint that was restored then, has the
        same cause: that checkpoint is too new.
        """
        latest = step - self.margin
        for each in past:
            if each.to_step <= step <= each.at_step + self.margin:
                latest = min(latest, each.to_step - 1)
        return max(latest, 0)

    @property
    def keeping(self) -> Retention:
        """Keeps the checkpoints that a later rollback may need, whatever else the run keeps."""
        return KeepForRollback(self.margin)


@dataclass(frozen=True, slots=True, repr=False)
class KeepForRollback(Retention):
    """Keep the checkpoints of the last ``margin`` steps, and the newest two before: for a rollback, and for a second
    one from the same place."""

    margin: int

    def __call__(self, entries: Sequence[CheckpointSummary]) -> set[int]:
        steps = [entry.step for entry in entries]
        far_enough = [step for step in steps if step <= steps[-1] - self.margin]
        return {*steps[len(far_enough) :], *far_enough[-2:]}


def recovery_of(given: RecoveryPolicy | str | None) -> RecoveryPolicy | None:
    """Convert user input (a policy, or its text) to a policy. Raises ConfigurationError for any other input."""
    if isinstance(given, str):
        read = read_policies(given, [RecoveryPolicy])
        given = read[0] if len(read) == 1 else None
    if isinstance(given, RecoveryPolicy) or given is None:
        return given
    raise ConfigurationError(f"{given!r} is not a recovery policy; use RecoveryPolicy(…), or None for no rollbacks")
