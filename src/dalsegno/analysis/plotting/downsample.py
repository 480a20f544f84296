"""Downsampling: the points of a long curve that give the same picture as all of them."""

from __future__ import annotations

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
