"""What a metric was, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HUGE = 1e280
"""Values beyond are drawn as infinite ones are: no scale has room around the largest numbers."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, in the order in which it was logged. All arrays have the shape (n,)."""

    name: str
    run: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    """Non-finite values included."""
    epochs: NDArray[np.float64] | None = None
    """None where the log does not know them; NaN where single records do not."""
    times: NDArray[np.float64] | None = None
    """UTC seconds; None and NaN as for ``epochs``."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class ParameterSeries:
    """One number for each of p parameters, at each of n steps."""

    name: str
    run: str
    parameters: tuple[str, ...]
    """Their names, in the order in which the log has them."""
    steps: NDArray[np.int64]
    """Shape (n,)."""
    values: NDArray[np.float64]
    """Shape (n, p); NaN where a record lacks a parameter."""
