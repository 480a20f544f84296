"""Plots of runs. View: axes and smoothing of a plot, for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dalsegno.errors import ConfigurationError
from dalsegno.stateful.annotations import check_types

XAxis = Literal["step", "epoch", "time", "tokens"]
X_AXES: tuple[XAxis, ...] = get_args(XAxis)
Limits = tuple[float | None, float | None]


@check_types
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Axes and smoothing of a plot. Raises ConfigurationError for an invalid value."""

    x: XAxis = "step"
    """Quantity of the x axis. Time is wall-clock time since a run's first record, pauses between legs included."""
    smooth: int | None = None
    """Records in the trailing mean; 1: none; None: 1/100 of them, no smoothing below 200 records. Settings, such as the
    learning rate, are drawn as logged."""
    log: bool = False
    """Logarithmic y axis; values that are not positive are not drawn."""
    perplexity: bool = False
    """Plot exp(loss) in place of the loss."""
    xlim: Limits | None = None
    """Range of the x axis in its unit; None for an end: that of the data."""
    ylim: Limits | None = None
    """Range of the y axis, as ``xlim``."""
    ignore_outliers: bool = False
    """Scale the y axis to the middle 98% of the values."""

    def __post_init__(self) -> None:
        if self.smooth is not None and self.smooth < 1:
            raise ConfigurationError(f"smooth is {self.smooth!r}; allowed: a number of records, at least 1 (1: none)")
        for name, limits in (("xlim", self.xlim), ("ylim", self.ylim)):
            ends = [end for end in limits or () if end is not None]
            if not all(map(math.isfinite, ends)) or (len(ends) == 2 and not ends[0] < ends[1]):
                allowed = "(low, high) with low < high, None for an open end"
                raise ConfigurationError(f"{name} is {limits!r}; allowed: {allowed}")
