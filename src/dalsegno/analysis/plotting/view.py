"""View: how curves are looked at, wherever they are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dalsegno.errors import ConfigurationError

XAxis = Literal["step", "epoch", "time", "tokens"]
Limits = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """
    Raises:
        ConfigurationError: for a value that cannot work.
    """

    x: XAxis = "step"
    """What runs to the right. Time is wall clock from a run's first record on, pauses between legs included."""
    smooth: int | None = None
    """Records to average; 1: none; None: a hundredth of them, and none of logs under 200."""
    log: bool = False
    """A logarithmic scale of values; what is not over 0 is not drawn."""
    perplexity: bool = False
    """e to the loss in place of the loss."""
    xlim: Limits | None = None
    """From where to where, in units of the x axis; None on one side: as far as there is something."""
    ylim: Limits | None = None
    ignore_outliers: bool = False
    """Let the scale of values be that of the middle 98 of 100 of them."""

    def __post_init__(self) -> None:
        if self.x not in get_args(XAxis):
            raise ConfigurationError(f"x is {self.x!r}; allowed: {', '.join(map(repr, get_args(XAxis)))}")
        if self.smooth is not None and self.smooth < 1:
            raise ConfigurationError(f"smooth is {self.smooth!r}; allowed: a number of records, at least 1 (1: none)")
        for name, limits in (("xlim", self.xlim), ("ylim", self.ylim)):
            ends = [end for end in limits or () if end is not None]
            if not all(map(math.isfinite, ends)) or (len(ends) == 2 and not ends[0] < ends[1]):
                allowed = "(low, high) with low < high, None for an open end"
                raise ConfigurationError(f"{name} is {limits!r}; allowed: {allowed}")
