"""Which points of a long curve to draw, so that it looks as if all were drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def downsample(values: NDArray[np.float64], buckets: int) -> NDArray[np.int64]:
    """The indices to keep, ascending: all where there are few, else at most five of each of ``buckets`` stretches.

    These are a stretch's first and last, its lowest and highest, and the first that is not finite: no spike is lost,
    and a line through them covers the pixels that the line through all would (the idea of M4, Jugel et al. 2014).

    Args:
        values: shape (n,), in the order in which they are drawn.
        buckets: at least 1; the width of the picture in pixels, say.
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
    """Which values no line leads to: finite ones without a finite neighbour, as the first record of a run is. (n,)."""
    finite = np.pad(np.isfinite(values), 1)
    found: NDArray[np.bool_] = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return found


def _landmarks(stretches: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of each row its first, last, lowest, highest and first non-finite value, as indices into all rows in a line."""
    rows, size = stretches.shape
    finite = np.isfinite(stretches)
    first = np.arange(0, rows * size, size)
    columns = [
        np.where(finite, stretches, np.inf).argmin(axis=1),
        np.where(finite, stretches, -np.inf).argmax(axis=1),
        finite.argmin(axis=1),  # 0, the first, where all are finite
    ]
    return np.concatenate([first, first + size - 1, *(first + column for column in columns)])
