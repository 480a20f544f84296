"""Recorded: the metrics that OLMo-core's callbacks record in a step, reduced over the ranks for dalsegno's record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.events.contexts import LogContext
from dalsegno.interop.collected import as_number

MERGES: Mapping[str, Callable[[float, float], float]] = {
    "latest": lambda first, second: second,
    "warn": lambda first, second: first,
    "sum": lambda first, second: first + second,
    "mean": lambda first, second: (first + second) / 2,
    "max": max,
    "min": min,
}
"""What a second value of a step does to the first, by OLMo-core's name."""

REDUCTIONS: Mapping[str, Callable[[list[float]], float]] = {
    "none": lambda values: values[0],
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "l2_norm": lambda values: math.hypot(*values),
}
"""How the values of the ranks become one, by OLMo-core's name; of those ranks that have recorded it, in rank order."""


class Recorded:
    """In a step without a record, what is recorded is dropped at its end."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, Any]] = {}  # reduction and value

    def add(self, name: str, value: Any, reduction: str, merge: str) -> None:
        if name in self._values:
            value = MERGES[merge](as_number(self._values[name][1]), as_number(value))
        self._values[name] = (reduction, value)

    def get(self, name: str) -> Any:
        """Return this rank's value; None if this step has none."""
        return self._values.get(name, (None, None))[1]

    def clear(self) -> None:
        self._values.clear()

    def move_into(self, ctx: LogContext) -> None:
        """Move what was recorded into the record. Collective."""
        here = {name: (reduction, as_number(value)) for name, (reduction, value) in self._values.items()}
        by_rank = collectives.gather(here, "metrics of OLMo-core's callbacks")
        for name in dict.fromkeys(name for each in by_rank for name in each):
            found = [each[name] for each in by_rank if name in each]
            ctx.logs[name] = REDUCTIONS[found[0][0]]([value for _, value in found])
        self.clear()
