"""Timing: several things measured in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from timeit import Timer
from typing import Any

CALLS = 1_000
ROUNDS = 201


def seconds_each(
    statements: Mapping[str, tuple[str, str]], names: Mapping[str, Any], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds that each statement takes, in each of the rounds of about a millisecond a statement.

    Args:
        statements: (what is timed, what is set up before it; names made there are local, as in a loop's own code).
        names: what the statements refer to.
    """
    timers = {name: Timer(*statement, globals=dict(names)) for name, statement in statements.items()}
    results: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            results[name].append(timer.timeit(CALLS) / CALLS)
    return results


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each measures in each round, after one round that does not count. Every other round goes backwards.

    If there is but one round, nothing is compared, and it is the first.
    """
    results: dict[str, list[float]] = {name: [] for name in measures}
    order = list(measures)
    for name in order if rounds > 1 else ():
        measures[name]()
    gc.collect()
    gc.freeze()  # so that a collection looks only through what was made since
    try:
        for _ in range(rounds):
            for name in order:
                gc.collect()
                results[name].append(measures[name]())
            order.reverse()
    finally:
        gc.unfreeze()
    return results


class Figure(float):
    """The median of some measurements, and how far they spread."""

    spread: float | None
    """Half the distance between their quartiles, as a share of the median; None of fewer than four."""


def figure(measured: Sequence[float]) -> Figure:
    middle = Figure(median(measured))
    if len(measured) < 4 or not middle:
        middle.spread = None
    else:
        first, _, third = quantiles(measured, n=4, method="inclusive")
        middle.spread = (third - first) / 2 / middle
    return middle


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """The median of the rounds' ratios: a machine that is slow for a while is so for both."""
    return figure([mine / other for mine, other in zip(ours, theirs, strict=True)])
