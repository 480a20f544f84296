"""Smoothing: centered moving means in linear time for any window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError

Floats = NDArray[np.float64]


def smooth(values: Floats, window: int) -> Floats:
    """Centered moving mean over ``window // 2`` values on either side. Shape (n,), as ``values``.

    At the start the window reaches no further ahead than back, so that a steep start is not shifted; at the end it is
    cut off. Non-finite values are left out; the mean of no finite value is NaN.

    Raises:
        ConfigurationError: if ``window`` is below 1.
    """
    if window < 1:
        raise ConfigurationError(f"smooth is {window!r}; allowed: a number of records, at least 1 (1: none)")
    half = window // 2
    finite = np.isfinite(values)
    scale = 4.0 * window
    if window > 1 and np.abs(values).max(initial=0, where=finite) > np.finfo(np.float64).max / scale:
        return smooth(values / scale, window) * scale  # the sums would overflow
    lengths = _window_lengths(len(values), half)
    if finite.all():
        return _window_sums(values, half) / lengths
    counts = lengths - _window_sums((~finite).astype(np.float64), half)
    sums = _window_sums(np.where(finite, values, 0.0), half)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean(values: Floats) -> float:
    """Mean of all values: NaN if one is NaN; finite if all are, however large."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.mean()
        return float(found if np.isfinite(found) or not np.isfinite(values).all() else (values / len(values)).sum())


def automatic_window(records: int) -> int:
    """Default smoothing window: 1/100 of the records, no smoothing below 200."""
    return 1 if records < 200 else max(5, records // 100)


def _window_lengths(n: int, half: int) -> NDArray[np.int64]:
    index = np.arange(n)
    return np.minimum(n, index + np.minimum(half, index) + 1) - np.maximum(0, index - half)


def _window_sums(values: Floats, half: int) -> Floats:
    """Sums over windows of 2·half + 1.

    Not differences of one cumulative sum, in which a single value of 1e30 would wipe out all later ones. Instead,
    blocks of the window's length are summed cumulatively from both ends, and a window is the end of one block plus the
    start of the next (van Herk 1992, for minima), so that a sum contains only values of its window.
    """
    n, width = len(values), 2 * half + 1
    sums = np.empty(n)
    begin = min(half, n)
    if begin:
        sums[:begin] = np.cumsum(values[: 2 * half])[np.minimum(2 * np.arange(begin), n - 1)]
    end = max(half, n - half)
    if end < n:
        sums[end:] = np.cumsum(values[end - half :][::-1])[::-1][: n - end]
    if n - half > half:
        padded = np.concatenate([values, np.zeros(-n % width)]).reshape(-1, width)
        forward = np.cumsum(padded, axis=1).ravel()
        backward = np.cumsum(padded[:, ::-1], axis=1)[:, ::-1].ravel()
        first = np.arange(n - width + 1)
        whole = forward[first + width - 1]
        sums[half : n - half] = np.where(first % width == 0, whole, whole + backward[first])
    return sums
