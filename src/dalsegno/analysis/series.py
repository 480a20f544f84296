"""Series: the values of a metric over the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError

HUGE = 1e280
"""Larger values are drawn as infinite ones: an axis needs room around its largest number."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, in logging order. All arrays have shape (n,)."""

    name: str
    run: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    """Non-finite values included."""
    epochs: NDArray[np.float64] | None = None
    """None if the log has no epochs; NaN for records without one."""
    times: NDArray[np.float64] | None = None
    """UTC seconds; None and NaN as in ``epochs``."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class ParameterSeries:
    """One number for each of p parameters, at each of n steps."""

    name: str
    run: str
    parameters: tuple[str, ...]
    """Names, in the order of the log."""
    steps: NDArray[np.int64]
    """Shape (n,)."""
    values: NDArray[np.float64]
    """Shape (n, p); NaN where a record lacks a parameter."""

    def every(self, stride: int) -> ParameterSeries:
        """Return every ``stride``-th record, from the first on.

        Raises:
            ConfigurationError: for a stride below 1.
        """
        if stride < 1:
            raise ConfigurationError(f"stride is {stride!r}; allowed: at least 1")
        return replace(self, steps=self.steps[::stride], values=self.values[::stride])
