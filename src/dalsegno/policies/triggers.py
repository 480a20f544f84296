"""When something is due: at steps, at epochs, by the clock, at a new best metric, at the end.

Occasions are joined with ``|``; what any of them asks for is due.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.errors import ConfigurationError

from .notation import Policy, read_policies


class SaveTrigger(Policy):
    """An occasion to save. Whatever the occasions, the end of the run is one more, unless there are none at all."""

    __slots__ = ()

    on_best = False
    """Whether each new best metric is one."""

    @property
    def interval_s(self) -> float:
        """It is due when so long has gone by since it was the last time, on whichever occasion."""
        return math.inf

    def __bool__(self) -> bool:
        """Whether it is ever due."""
        return True

    def at_step(self, step: int) -> bool:
        """Whether it is due when ``step`` optimizer steps are finished."""
        return False

    def at_epoch(self, epoch: int) -> bool:
        """Whether it is due when ``epoch`` epochs are finished."""
        return False

    def __or__(self, other: SaveTrigger) -> SaveTrigger:
        return AnyTrigger((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True, repr=False)
class Every(SaveTrigger):
    """Due at each multiple of ``steps`` (optimizer steps) or ``epochs`` (whole epochs); 0 means never.

    These two are pure functions of the position in the run, so that a resumed run is due exactly where an uninterrupted
    one is. ``seconds`` and ``minutes`` (they are added up) go by rank 0's clock; they begin anew with each leg.

    Raises:
        ConfigurationError: if a number is negative, or steps or epochs are not whole.
    """

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        for unit, value in (("steps", self.steps), ("epochs", self.epochs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigurationError(f"Every({unit}={value!r}): needs a whole number, 0 (never) or more")
        for unit, time in (("seconds", self.seconds), ("minutes", self.minutes)):
            if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < math.inf:
                raise ConfigurationError(f"Every({unit}={time!r}): needs a number, 0 (never) or more")

    def __bool__(self) -> bool:
        return bool(self.steps or self.epochs or self.seconds or self.minutes)

    @property
    def interval_s(self) -> float:
        return self.seconds + 60 * self.minutes or math.inf

    def at_step(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def at_epoch(self, epoch: int) -> bool:
        return self.epochs > 0 and epoch % self.epochs == 0


@dataclass(frozen=True, slots=True, repr=False, init=False)
class AtSteps(SaveTrigger):
    """Due when just these numbers of optimizer steps are finished: ``AtSteps(100, 1000, 10_000)``.

    Raises:
        ConfigurationError: if there is none, or one is not a whole number of at least 1.
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps or not all(type(step) is int and step > 0 for step in steps):
            raise ConfigurationError(f"AtSteps({', '.join(map(repr, steps))}): needs whole numbers of at least 1")
        object.__setattr__(self, "steps", tuple(sorted({*steps})))

    def __repr__(self) -> str:
        return f"AtSteps({', '.join(map(str, self.steps))})"

    def at_step(self, step: int) -> bool:
        return step in self.steps


@dataclass(frozen=True, slots=True, repr=False)
class OnBest(SaveTrigger):
    """Due when an evaluation has found a new best ``metric_for_best_model``."""

    on_best = True


@dataclass(frozen=True, slots=True, repr=False)
class AtEnd(SaveTrigger):
    """Due at the end of the run, and at no other time."""


@dataclass(frozen=True, slots=True, repr=False)
class AnyTrigger(SaveTrigger):
    """What ``|`` makes of several."""

    parts: tuple[SaveTrigger, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def __bool__(self) -> bool:
        return any(self.parts)

    @property
    def on_best(self) -> bool:  # type: ignore[override]
        return any(part.on_best for part in self.parts)

    @property
    def interval_s(self) -> float:
        return min(part.interval_s for part in self.parts)

    def at_step(self, step: int) -> bool:
        return any(part.at_step(step) for part in self.parts)

    def at_epoch(self, epoch: int) -> bool:
        return any(part.at_epoch(epoch) for part in self.parts)


def save_trigger(given: SaveTrigger | str | Sequence[SaveTrigger | str]) -> SaveTrigger:
    """One occasion of what a user may give: one, several in a list, or the same as text.

    Raises:
        ConfigurationError: if it is something else.
    """
    if isinstance(given, SaveTrigger):
        return given
    if isinstance(given, str):
        read = read_policies(given, (Every, AtSteps, OnBest, AtEnd))
        return save_trigger([each for each in read if isinstance(each, SaveTrigger)])
    if not isinstance(given, Sequence):
        raise ConfigurationError(
            f"{given!r} does not say when; use Every(…), AtSteps(…), OnBest(), AtEnd(), or several in a list"
        )
    parts = tuple(part for each in given for part in _parts(save_trigger(each)))
    return parts[0] if len(parts) == 1 else AnyTrigger(parts)


def _parts(when: SaveTrigger) -> tuple[SaveTrigger, ...]:
    if not isinstance(when, SaveTrigger):
        raise ConfigurationError(f"{when!r} does not say when; use Every(…), AtSteps(…), OnBest() or AtEnd()")
    return when.parts if isinstance(when, AnyTrigger) else (when,)
