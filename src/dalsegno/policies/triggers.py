"""When something happens in a run. Save triggers: at steps, at epochs, by the clock, at a new best metric, at the end.
``StepSchedule``: an integer that changes at given steps.

Triggers joined with ``|`` are due whenever any of them is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.errors import ConfigurationError

from . import Joined, ListedSteps, Policy, check_integers, parts_of, read_policies

_OR_NEVER = "an integer, 0 (never) or more"


class SaveTrigger(Policy):
    """When to save. Any trigger also saves at the end of the run, unless it is never due (``Every()``)."""

    __slots__ = ()

    on_best = False
    """Whether each new best metric is due."""

    @property
    def interval_s(self) -> float:
        """Seconds after the last save, for whatever reason, at which the next one is due."""
        return math.inf

    def __bool__(self) -> bool:
        """Whether the trigger is ever due."""
        return True

    def at_step(self, step: int) -> bool:
        """Whether a save is due after ``step`` finished optimizer steps."""
        return False

    def next_step(self, step: int) -> float:
        """Return the first step after ``step`` at which :meth:`at_step` may be true; infinite if there is none."""
        return step + 1

    def at_epoch(self, epoch: int) -> bool:
        """Whether a save is due after ``epoch`` finished epochs."""
        return False

    def __or__(self, other: SaveTrigger) -> SaveTrigger:
        return save_trigger([self, other])


@dataclass(frozen=True, slots=True, repr=False)
class Every(SaveTrigger):
    """Due at each multiple of ``steps`` (optimizer steps) or ``epochs`` (whole epochs); 0 means never.

    Steps and epochs are pure functions of the position in the run, so a resumed run saves exactly where an
    uninterrupted one does. ``seconds`` and ``minutes`` (their sum counts) use rank 0's clock and restart with each leg.
    """

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        check_integers("Every", self, {"steps": 0, "epochs": 0}, hint=_OR_NEVER)
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

    def next_step(self, step: int) -> float:
        return step - step % self.steps + self.steps if self.steps else math.inf

    def at_epoch(self, epoch: int) -> bool:
        return self.epochs > 0 and epoch % self.epochs == 0


class AtSteps(ListedSteps, SaveTrigger):
    """Due after exactly these numbers of optimizer steps: ``AtSteps(100, 1000, 10_000)``."""

    __slots__ = ()

    def at_step(self, step: int) -> bool:
        return step in self.steps

    def next_step(self, step: int) -> float:
        return next((each for each in self.steps if each > step), math.inf)


@dataclass(frozen=True, slots=True, repr=False)
class OnBest(SaveTrigger):
    """Due when an evaluation finds a new best ``metric_for_best_model``."""

    on_best = True

    def next_step(self, step: int) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, repr=False)
class AtEnd(SaveTrigger):
    """Due only at the end of the run."""

    def next_step(self, step: int) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, repr=False)
class AnyTrigger(Joined, SaveTrigger):
    """Several triggers joined with ``|``."""

    parts: tuple[SaveTrigger, ...]

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

    def next_step(self, step: int) -> float:
        return min(part.next_step(step) for part in self.parts)

    def at_epoch(self, epoch: int) -> bool:
        return any(part.at_epoch(epoch) for part in self.parts)


def save_trigger(given: SaveTrigger | str | Sequence[SaveTrigger | str]) -> SaveTrigger:
    """Convert user input (a trigger, its text, or a list of either) to one trigger. Raises ConfigurationError for any
    other input, or an empty list."""
    parts = parts_of(given, SaveTrigger, (Every, AtSteps, OnBest, AtEnd), "save trigger")
    return parts[0] if len(parts) == 1 else AnyTrigger(parts)


@dataclass(frozen=True, slots=True, repr=False)
class InMemory(Policy):
    """Save into shared memory at each multiple of ``steps`` or ``epochs``; 0 means never.

    ``copies``: number of other hosts that keep a copy of what this host's ranks save, so that the run also resumes from
    memory after that many neighbouring hosts are lost. Each takes as much memory again.
    """

    steps: int = 0
    epochs: int = 0
    copies: int = 0

    def __post_init__(self) -> None:
        check_integers("InMemory", self, {"steps": 0, "epochs": 0, "copies": 0}, hint=_OR_NEVER)

    def __bool__(self) -> bool:
        """Whether a save is ever due."""
        return bool(self.steps or self.epochs)

    @property
    def when(self) -> Every:
        """The steps and epochs at which a save is due."""
        return Every(self.steps, self.epochs)


def memory_trigger(given: InMemory | SaveTrigger | str) -> InMemory | Every:
    """Convert user input to a trigger by steps and epochs alone, which all ranks know without asking each other."""
    if isinstance(given, str) and given.strip().startswith(InMemory.__name__):
        given, *others = read_policies(given, (InMemory,))
        if others:
            raise ConfigurationError(f"{given!r} and {others[0]!r}: give one")
    if isinstance(given, InMemory):
        return given
    when = save_trigger(given)
    if not isinstance(when, Every) or when.interval_s < math.inf:
        raise ConfigurationError(f"{when!r} needs steps or epochs, such as Every(steps=10)")
    return when


def in_memory(trigger: InMemory | Every) -> InMemory:
    """The trigger as :class:`InMemory`; ``Every(…)`` keeps no copies."""
    return trigger if isinstance(trigger, InMemory) else InMemory(trigger.steps, trigger.epochs)


StepValues = Mapping[int, int] | Mapping[str, int] | str
"""Value by the number of finished steps from which it applies: ``{0: 1, 1000: 2}``, or that as text."""


class StepSchedule:
    """``{0: 1, 1000: 2}``: 1 for the first 1000 optimizer steps, then 2.

    A pure function of the step number: a resumed run needs no state to have the same values.

    Args:
        setting: name of the setting, for error messages.
        given: as the user writes it; a TOML or JSON table has its steps as strings.

    Raises:
        ConfigurationError: unless ``given`` has integers, values of at least 1, and a value for step 0.
    """

    def __init__(self, setting: str, given: StepValues) -> None:
        try:
            values = _values(given)
        except (TypeError, ValueError):
            values = {}
        if 0 not in values or min(values) < 0 or min(values.values()) < 1:
            raise ConfigurationError(
                f"{setting}={given!r}: needs integers of at least 1 by the step from which they apply, the first "
                "from step 0, such as {0: 1, 1000: 2}"
            )
        self.values = dict(sorted(values.items()))
        """Value by the number of finished steps from which it applies, in ascending order."""
        self._starts = [*self.values]

    @property
    def last_change(self) -> int:
        """Number of finished steps from which the value stays the same."""
        return self._starts[-1]

    def at(self, done: int) -> int:
        """Return the value for the step after ``done`` finished ones."""
        return self.values[self._starts[bisect_right(self._starts, done) - 1]]

    def steps_to_consume(self, count: int, done: int) -> int:
        """Return the number of steps after ``done`` finished ones that consume ``count``, if each consumes its value;
        the last one may consume less."""
        first = done
        while count > 0:
            later = bisect_right(self._starts, done)
            value = self.values[self._starts[later - 1]]
            steps = math.ceil(count / value)
            if later < len(self._starts):
                steps = min(steps, self._starts[later] - done)
            count -= steps * value
            done += steps
        return done - first


def _values(given: StepValues) -> dict[int, int]:
    """Raises TypeError or ValueError for anything but integers, and for a step that is given twice."""
    pairs: list[tuple[int | str, int]]
    if isinstance(given, str):
        parts = [part.split(":") for part in given.strip().removeprefix("{").removesuffix("}").split(",")]
        pairs = [(step, int(value)) for step, value in parts]
    elif isinstance(given, Mapping):
        pairs = [*given.items()]
    else:
        raise TypeError
    values: dict[int, int] = {}
    for step, value in pairs:
        if type(step) not in (int, str) or type(value) is not int or int(step) in values:
            raise ValueError
        values[int(step)] = value
    return values
