"""Downsampling, to the points of a long curve that look the same as all of them; ticks, round numbers on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def downsample(values: NDArray[np.float64], buckets: int) -> NDArray[np.int64]:
    """Indices to keep, ascending: all if there are few, else at most five in each of ``buckets`` stretches.

    These are a stretch's first, last, lowest, highest and first non-finite value, so that no spike is lost and the line
    covers the same pixels as the line through all points (M4, Jugel et al. 2014).

    Args:
        values: shape (n,), in drawing order.
        buckets: at least 1, such as the width of the picture in pixels.
    """
    n = len(values)
    if n <= 5 * buckets:
        return np.arange(n)
    size = -(-n // buckets)
    whole = n // size * size
    kept = _landmarks(values[:whole].reshape(-1, size))
    if whole < n:
        kept = np.concatenate([kept, whole + _landmarks(values[whole:].reshape(1, -1))])
    return np.unique(kept)


def lone(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Finite values without a finite neighbour, to which no line leads. Shape (n,)."""
    finite = np.pad(np.isfinite(values), 1)
    found: NDArray[np.bool_] = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return found


def _landmarks(stretches: NDArray[np.float64]) -> NDArray[np.int64]:
    """First, last, lowest, highest and first non-finite value of each row, as indices into the flattened array."""
    rows, size = stretches.shape
    finite = np.isfinite(stretches)
    first = np.arange(0, rows * size, size)
    columns = [
        np.where(finite, stretches, np.inf).argmin(axis=1),
        np.where(finite, stretches, -np.inf).argmax(axis=1),
        finite.argmin(axis=1),  # index 0, the first value, if all are finite
    ]
    return np.concatenate([first, first + size - 1, *(first + column for column in columns)])


LEAST = 1e-300  # least distance of ticks; below it floats are too sparse


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between finite ``low`` and ``high``, about ``most`` of them."""
    rough = (high - low) / most
    if not rough > LEAST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)][: most + 1]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between positive ``low`` and ``high``; with multiples of them if these are few, and those of
    :func:`nice_ticks` in a narrow range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(found) < 2:
            return nice_ticks(low, high, most)
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Each of evenly spaced ticks with its label."""
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    return [(tick, tick_label(tick, apart)) for tick in ticks]


def tick_label(value: float, step: float) -> str:
    """Label with the digits that distinguish neighbouring ticks: ``0.25``, ``1,500``, ``2e+09``."""
    if (value or step < 1e-15) and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
