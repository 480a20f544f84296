"""Spikes: records far outside the noise of a metric, and whether it recovers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError
from dalsegno.stateful.annotations import check_types

from .divergence import Mode
from .series import Series

Floats = NDArray[np.float64]

MAD_TO_SIGMA = 1.4826  # factor from the median absolute deviation of normal noise to its standard deviation
LEAST_NOISE = 1e-3  # least noise, as a fraction of the median: a constant metric has no spikes of 1e-9
AT_ONCE = 1 << 10
"""Windows processed at a time. Each is a copy of its part of the log; this many fit the processor's cache."""


@dataclass(frozen=True, slots=True)
class Spike:
    """Consecutive records outside the noise."""

    step: int
    """Step of the most extreme record."""
    value: float
    usual: float
    """Median of the records before it."""
    sigmas: float
    """Distance from the median in standard deviations of the noise; infinite if the value is not finite."""
    first_step: int
    last_step: int
    records: int
    """Number of records from ``first_step`` to ``last_step``."""
    recovered: bool
    """Whether the next record is within the noise before the spike."""


@check_types
def find_spikes(
    series: Series,
    *,
    window: int | None = None,
    sigmas: float = 6.0,
    mode: Mode = "min",
) -> list[Spike]:
    """The spikes of a metric, in the order of its steps.

    A record belongs to a spike if it is more than ``sigmas`` standard deviations above the median of the preceding
    records, or not finite. Median and deviation (from the median absolute deviation, which spikes do not affect) cover
    ``window`` records and are updated every half window.

    Args:
        window: at least 4; None: 1/10 of the records, from 16 to 50.
        sigmas: least height in standard deviations.
        mode: ``"min"`` for metrics that should be low, whose spikes point up; ``"max"``: spikes point down.

    Raises:
        ConfigurationError: for a window below 4, or sigmas that are not positive.
    """
    steps, values = series.steps, series.values
    if window is None:
        window = min(max(16, len(values) // 10), 50)
    if window < 4:
        raise ConfigurationError(f"window is {window!r}; allowed: at least 4 records")
    if not sigmas > 0:
        raise ConfigurationError(f"sigmas is {sigmas!r}; allowed: a number over 0")
    if not len(values):
        return []
    usual, noise = _usual(values, window)
    sign = 1.0 if mode == "min" else -1.0
    with np.errstate(invalid="ignore", over="ignore"):
        heights = sign * (values - usual) / noise
    heights[~np.isfinite(values)] = np.inf
    edges = np.diff((heights > sigmas).astype(np.int8), prepend=0, append=0)
    spikes = []
    for first, behind in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        top = first + int(np.argmax(heights[first:behind]))
        with np.errstate(invalid="ignore", over="ignore"):
            back = behind < len(values) and not sign * (values[behind] - usual[first]) > sigmas * noise[first]
        spikes.append(
            Spike(
                step=int(steps[top]),
                value=float(values[top]),
                usual=float(usual[top]),
                sigmas=float(heights[top]),
                first_step=int(steps[first]),
                last_step=int(steps[behind - 1]),
                records=int(behind - first),
                recovered=bool(back),
            )
        )
    return spikes


def _usual(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Median and noise before each record, shape (n,) each; NaN in the first window, which no full window precedes."""
    n, stride = len(values), window // 2
    usual, noise = np.full(n, np.nan), np.full(n, np.nan)
    if n <= window:
        return usual, noise
    windows = np.lib.stride_tricks.sliding_window_view(values[: n - 1], window)[::stride]
    parts = [_median_and_noise(windows[begin : begin + AT_ONCE]) for begin in range(0, len(windows), AT_ONCE)]
    medians, deviations = (np.concatenate(part) for part in zip(*parts, strict=True))
    deviations = np.maximum(deviations, LEAST_NOISE * np.abs(medians))
    deviations[deviations == 0] = np.finfo(np.float64).tiny
    usual[window:], noise[window:] = (np.repeat(each, stride)[: n - window] for each in (medians, deviations))
    return usual, noise


def _median_and_noise(windows: Floats) -> tuple[Floats, Floats]:
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(windows)
        rows = windows if finite.all() else np.where(finite, windows, np.nan)
        medians = _medians(rows)
        return medians, MAD_TO_SIGMA * _medians(np.abs(rows - medians[:, None]))


def _medians(rows: Floats) -> Floats:
    """Median of each row, NaN ignored; NaN for a row of only NaN.

    Sorts the rows: for short ones faster than a partition. (``np.median`` imports numpy.ma on first use, which takes as
    long as everything else for a short log.)
    """
    ordered = np.sort(rows, axis=1)  # NaN comes last
    known = rows.shape[1] - np.count_nonzero(np.isnan(ordered), axis=1)
    every = np.arange(len(rows))
    low, high = ordered[every, np.maximum(known - 1, 0) // 2], ordered[every, known // 2]
    medians: Floats = low / 2 + high / 2  # low + high may overflow
    return medians
