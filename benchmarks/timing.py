"""Timing: several things measured in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from statistics import median
from timeit import Timer
from typing import Any

ROUNDS = 25
CALLS = 5_000


def seconds_each(statements: Mapping[str, tuple[str, str]], names: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that each statement takes: the median over rounds in which each has its turn.

    Args:
        statements: (what is timed, what is set up before it; names made there are local, as in a loop's own code).
        names: what the statements refer to.
    """
    measures = {name: _one_of(Timer(*statement, globals=dict(names))) for name, statement in statements.items()}
    rounds = in_turns(measures, ROUNDS)
    return {name: median(seconds) for name, seconds in rounds.items()}


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each measures in each round, after one round that does not count. Every other round goes backwards."""
    results: dict[str, list[float]] = {name: [] for name in measures}
    order = list(measures)
    for name in order:
        measures[name]()
    for _ in range(rounds):
        for name in order:
            gc.collect()
            results[name].append(measures[name]())
        order.reverse()
    return results


def _one_of(timer: Timer) -> Callable[[], float]:
    return lambda: timer.timeit(CALLS) / CALLS
