"""Series made up for a test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dalsegno.analysis import Series

INF, NAN = float("inf"), float("nan")


def series(values: Sequence[float], steps: Sequence[int] | None = None, name: str = "loss") -> Series:
    """Logged every 10 steps, unless set otherwise."""
    places = range(10, 10 * len(values) + 1, 10) if steps is None else steps
    return Series(name, "a run", np.array(places, np.int64), np.array(values, np.float64))


def falling(records: int = 1000, seed: int = 0, noise: float = 0.1) -> Series:
    """What a loss usually does: from 8 to 2, with noise that is new in each record."""
    steps = np.arange(records)
    values = 2 + 6 * np.exp(-6 * steps / records) + noise * np.random.default_rng(seed).normal(size=records)
    return series(list(values))


def with_values(like: Series, values: Sequence[float]) -> Series:
    return Series(like.name, like.run, like.steps, np.array(values, np.float64))
