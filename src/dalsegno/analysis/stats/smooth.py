"""A curve without its noise: moving means in one pass, however wide the window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError

Floats = NDArray[np.float64]


def smooth(values: Floats, window: int) -> Floats:
    """The mean around each value: ``window // 2`` values to either side, and itself. Shape (n,), as ``values``.

    At the beginning it reaches no further ahead than back, so that a steep start stays where it is; at the end it goes
    as far as there is something. What is not finite is left out; where nothing else is there, the mean is NaN.

    Raises:
        ConfigurationError: if ``window`` is under 1.
    """
    if window < 1:
        raise ConfigurationError(f"smooth is {window!r}; allowed: a number of records, at least 1 (1: none)")
    half = window // 2
    finite = np.isfinite(values)
    scale = 4.0 * window
    if window > 1 and np.abs(values).max(initial=0, where=finite) > np.finfo(np.float64).max / scale:
        return smooth(values / scale, window) * scale  # else their sums would be more than any float
    lengths = _window_lengths(len(values), half)
    if finite.all():
        return _window_sums(values, half) / lengths
    counts = lengths - _window_sums((~finite).astype(np.float64), half)
    sums = _window_sums(np.where(finite, values, 0.0), half)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean(values: Floats) -> float:
    """Of all of them: NaN if one is. Finite if they are, however large."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.mean()
        return float(found if np.isfinite(found) or not np.isfinite(values).all() else (values / len(values)).sum())


def automatic_window(records: int) -> int:
    """How many records to smooth over if nobody says: a hundredth of them, none below 200."""
    return 1 if records < 200 else max(5, records // 100)


def _window_lengths(n: int, half: int) -> NDArray[np.int64]:
    index = np.arange(n)
    return np.minimum(n, index + np.minimum(half, index) + 1) - np.maximum(0, index - half)


def _window_sums(values: Floats, half: int) -> Floats:
    """Sums over windows of 2·half + 1.

    Not as differences of one long cumulative sum: a single value of 1e30 would wipe out all that follow it. Blocks of
    a window's length are summed from their begin on and from their end back, and a window is the end of one and the
    begin of the next (van Herk 1992, who did so for minima). So a sum holds nothing but what is in its window.
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
