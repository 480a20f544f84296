"""StepSchedule: an integer that changes at given steps of a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

from dalsegno.errors import ConfigurationError

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
