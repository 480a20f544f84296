"""Time and Timestamp: Composer's durations, and how far a run has come."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import total_ordering
from typing import Any

_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[-+]?\d+)?)\s*(iter|ep|ba|sp|tok|dur|sec)\s*", re.IGNORECASE)


@total_ordering
class Time:
    """A duration: ``Time(5, "ba")``. Compares, adds and subtracts with times of the same unit, numbers and texts.

    Units: ``ep`` (epochs), ``ba`` (steps), ``sp`` (samples), ``tok`` (tokens), ``dur`` (fraction of the run).
    """

    def __init__(self, value: float, unit: str) -> None:
        self.value = value
        self.unit = str(getattr(unit, "value", unit))

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Parse ``"10ba"``.

        Raises:
            ValueError: for another text.
        """
        found = _TEXT.fullmatch(timestring)
        if found is None:
            raise ValueError(f"{timestring!r} is not a time; write a number and a unit: 10ba, 2ep, 0.5dur")
        unit = found[2].lower()
        return cls(float(found[1]) if unit == "dur" else int(float(found[1])), unit)

    def _other(self, other: Any) -> Any:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not isinstance(other, Time):
            return other
        if other.unit != self.unit:
            raise RuntimeError(f"{self} and {other} have different units")
        return other.value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == self._other(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < self._other(other))

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __add__(self, other: Any) -> Time:
        return Time(self.value + self._other(other), self.unit)

    def __sub__(self, other: Any) -> Time:
        return Time(self.value - self._other(other), self.unit)

    def __mod__(self, other: Any) -> Time:
        return Time(self.value % self._other(other), self.unit)

    def __mul__(self, factor: float) -> Time:
        return Time(type(self.value)(self.value * factor), self.unit)

    def __truediv__(self, other: Any) -> Time:
        if isinstance(other, (Time, str)):
            return Time(self.value / self._other(other), "dur")
        return Time(type(self.value)(self.value / other), self.unit)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    def __repr__(self) -> str:
        return f"Time({self.value}, {self.unit!r})"

    to_timestring = __str__


def time_of(value: float, unit: str) -> Any:
    """Return a time of Composer's own class if Composer is imported: its times compare with no others."""
    library = sys.modules.get("composer.core.time")
    return Time(value, unit) if library is None else library.Time(value, unit)


@dataclass(frozen=True, slots=True)
class Timestamp:
    """How far a run has come; each is a snapshot."""

    epoch: Any
    """Finished epochs."""
    batch: Any
    """Finished steps."""
    sample: Any
    """Samples on all ranks."""
    token: Any
    """Tokens on all ranks; exact at each record."""
    batch_in_epoch: Any
    sample_in_epoch: Any
    total_wct: timedelta
    """Time of training so far, over all legs."""

    def get(self, unit: Any) -> Any:
        """Return the time in this unit."""
        fields = {"ep": self.epoch, "ba": self.batch, "sp": self.sample, "tok": self.token}
        return fields[str(getattr(unit, "value", unit))]
