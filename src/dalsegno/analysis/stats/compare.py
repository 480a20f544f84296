"""Comparison of two runs, step by step: where the curves separate, and their difference at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dalsegno.analysis.series import Series
from dalsegno.errors import ConfigurationError

from .smooth import mean, smooth

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

SECOND_DIFFERENCE = math.sqrt(math.pi / 2 / 6)
"""Factor from the mean absolute second difference of independent normal noise to its standard deviation."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """One metric of two runs at the same steps. Arrays have shape (n,)."""

    steps: Steps
    """Strictly ascending."""
    first: Floats
    second: Floats
    interpolated: bool
    """Whether the runs logged at different steps, so that one of them is linearly interpolated."""

    @property
    def difference(self) -> Floats:
        """Second minus first."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.second - self.first


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing one metric of two runs. A step is None if there is no such step."""

    records: int
    """Number of compared steps."""
    interpolated: bool
    window: int
    """Records averaged to reduce noise."""
    differs_at: int | None
    """First step with different values."""
    parts_at: int | None
    """First step at which the curves separate: the mean difference stays outside the noise for more than half a
    window."""
    last_step: int | None
    """Last common step. The next three figures are means over the last window before it."""
    first: float
    second: float
    difference: float
    """Second minus first."""
    noise: float
    """Standard error of ``difference``, estimated from the noise of both curves."""

    @property
    def same(self) -> bool:
        """Whether the values are equal at all compared steps."""
        return self.records > 0 and self.differs_at is None


def align(first: Series, second: Series) -> Alignment:
    """Align two series on common steps.

    The last value of a repeated step is used. The steps are those in both series; if these are fewer than half of the
    sparser series' steps within the common range, the latter are used and the denser series is interpolated.
    """
    (steps_a, a), (steps_b, b) = _each_step_once(first), _each_step_once(second)
    common, in_a, in_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    if not len(steps_a) or not len(steps_b):
        return Alignment(common, a[in_a], b[in_b], interpolated=False)
    begin, end = max(steps_a[0], steps_b[0]), min(steps_a[-1], steps_b[-1])
    ranges = [steps[(steps >= begin) & (steps <= end)] for steps in (steps_a, steps_b)]
    sparser = min(ranges, key=len)
    if 2 * len(common) >= len(sparser):
        return Alignment(common, a[in_a], b[in_b], interpolated=False)
    return Alignment(sparser, np.interp(sparser, steps_a, a), np.interp(sparser, steps_b, b), interpolated=True)


def compare_series(first: Series, second: Series, *, window: int | None = None, sigmas: float = 4.0) -> Comparison:
    """Compare one metric of two runs.

    The curves separate where the mean difference over a window exceeds ``sigmas`` standard errors for more than half a
    window. The standard error is estimated from the second differences of both curves, so that a steep curve does not
    count as noisy, and assumes independent noise: for runs on the same data, ``parts_at`` is where they visibly
    separate, ``differs_at`` where they start to. They separate at once where only one value is finite.

    Args:
        window: records to average; None: 1/20 of the compared ones, from 1 to 50.
        sigmas: threshold in standard errors.

    Raises:
        ConfigurationError: for a window below 1, or sigmas that are not positive.
    """
    if window is not None and window < 1:
        raise ConfigurationError(f"window is {window!r}; allowed: at least 1 record")
    if not sigmas > 0:
        raise ConfigurationError(f"sigmas is {sigmas!r}; allowed: a number over 0")
    both = align(first, second)
    n = len(both.steps)
    if window is None:
        window = min(max(1, n // 20), 50)
    if not n:
        return Comparison(0, False, window, None, None, None, math.nan, math.nan, math.nan, math.nan)
    unlike = ~((both.first == both.second) | (np.isnan(both.first) & np.isnan(both.second)))
    with np.errstate(invalid="ignore", over="ignore"):
        noise = np.hypot(_noise(both.first, window), _noise(both.second, window)) / math.sqrt(window)
        outside = np.abs(smooth(both.difference, window)) > sigmas * noise
    broken = np.isfinite(both.first) != np.isfinite(both.second)
    last = slice(max(0, n - window), n)
    ours, theirs = mean(both.first[last]), mean(both.second[last])
    return Comparison(
        records=n,
        interpolated=both.interpolated,
        window=window,
        differs_at=_first_step(both.steps, unlike),
        parts_at=_first_step(both.steps, broken | _lasting(outside, window // 2 + 1)),
        last_step=int(both.steps[-1]),
        first=ours,
        second=theirs,
        difference=theirs - ours,
        noise=float(noise[-1]),
    )


def _each_step_once(series: Series) -> tuple[Steps, Floats]:
    """Steps and values in ascending order; the last value of a repeated step."""
    order = np.argsort(series.steps, kind="stable")
    steps, values = series.steps[order], series.values[order]
    last = np.append(np.diff(steps) != 0, True)[: len(steps)]
    return steps[last], values[last]


def _noise(values: Floats, window: int) -> Floats:
    """Standard deviation of one record's noise around each record, shape (n,)."""
    if len(values) < 3:
        return np.full(len(values), np.nan)
    second = np.abs(values[:-2] - 2 * values[1:-1] + values[2:])
    return smooth(np.pad(second, 1, mode="edge"), max(4 * window, 16)) * SECOND_DIFFERENCE


def _lasting(outside: NDArray[np.bool_], records: int) -> NDArray[np.bool_]:
    """Where a stretch of at least ``records`` in a row starts."""
    edges = np.diff(outside.astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    lasting = np.zeros(len(outside), dtype=np.bool_)
    lasting[begins[ends - begins >= records]] = True
    return lasting


def _first_step(steps: Steps, where: NDArray[np.bool_]) -> int | None:
    return int(steps[np.argmax(where)]) if where.any() else None
