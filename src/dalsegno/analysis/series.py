"""Series: the values of a metric over the steps, of one run or of each of its parameters; and moving means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError, NotFound, expect_known
from dalsegno.logs import ReadReport, read_records
from dalsegno.logs.values import is_number
from dalsegno.stateful.annotations import check_types

from .formats.source import Skipped, own_records

HUGE = 1e280  # larger values are drawn as infinite ones, those below its inverse as 0


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

    @check_types
    def every(self, stride: int) -> ParameterSeries:
        """Return every ``stride``-th record, from the first on. Raises ConfigurationError for a stride below 1."""
        if stride < 1:
            raise ConfigurationError(f"stride is {stride!r}; allowed: at least 1")
        return replace(self, steps=self.steps[::stride], values=self.values[::stride])


Floats = NDArray[np.float64]


@check_types
def smooth(values: Floats, window: int) -> Floats:
    """Centered moving mean over ``window // 2`` values on either side. Shape (n,), as ``values``.

    At the start the window reaches no further ahead than back, so that a steep start is not shifted; at the end it is
    cut off. Non-finite values are left out; the mean of no finite value is NaN. Raises ConfigurationError if ``window``
    is below 1.
    """
    return _moving_mean(values, window, partial(_sums_around, half=window // 2))


def trailing_mean(values: Floats, window: int) -> Floats:
    """Mean of each value and of those before it, ``window`` together. Shape (n,), as ``values``.

    Nothing shows before it happens, as in :func:`smooth`. Non-finite values, and errors, are as there.
    """
    return _moving_mean(values, window, partial(_sums_before, width=window))


def mean(values: Floats) -> float:
    """Mean of all values: NaN if one is NaN; finite if all are, however large."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.mean()
        return float(found if np.isfinite(found) or not np.isfinite(values).all() else (values / len(values)).sum())


def automatic_window(records: int) -> int:
    """Default smoothing window: 1/100 of the records, no smoothing below 200."""
    return 1 if records < 200 else max(5, records // 100)


def _moving_mean(values: Floats, window: int, sums: Callable[[Floats], Floats]) -> Floats:
    if window < 1:
        raise ConfigurationError(f"smooth is {window!r}; allowed: a number of records, at least 1 (1: none)")
    finite = np.isfinite(values)
    scale = 4.0 * window
    if window > 1 and np.abs(values).max(initial=0, where=finite) > np.finfo(np.float64).max / scale:
        return _moving_mean(values / scale, window, sums) * scale  # the sums would overflow
    counts = sums(finite.astype(np.float64))
    return np.where(counts > 0, sums(np.where(finite, values, 0.0)) / np.maximum(counts, 1), np.nan)


def _sums_around(values: Floats, half: int) -> Floats:
    """Sums over windows of 2·half + 1 around each value, as :func:`smooth` cuts them at the ends."""
    half = min(half, len(values))
    sums = _sums_before(np.concatenate([values, np.zeros(half)]), 2 * half + 1)[half:]
    sums[:half] = np.cumsum(values[: 2 * half])[np.minimum(2 * np.arange(half), len(values) - 1)]
    return sums


def _sums_before(values: Floats, width: int) -> Floats:
    """Sums over each value and the width - 1 before it.

    Not differences of one cumulative sum, in which a single value of 1e30 would wipe out all later ones. Instead,
    blocks of the window's length are summed cumulatively from both ends, and a window is the end of one block plus the
    start of the next (van Herk 1992, for minima), so that a sum contains only values of its window.
    """
    n = len(values)
    width = max(1, min(width, n))
    blocks = np.concatenate([np.zeros(width - 1), values, np.zeros((1 - n) % width)]).reshape(-1, width)
    forward = np.cumsum(blocks, axis=1).ravel()
    backward = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(n)
    whole: Floats = forward[first + width - 1]
    return np.where(first % width == 0, whole, whole + backward[first])


WHERE = {
    "grad_norm": ("gradient_norms", ("norms", "grad_norms"), "GradNormLogger"),
    "norm": ("parameter_norms", ("norms",), "ParameterNormLogger"),
    "spectral_norm": ("parameter_norms", ("spectral_norms",), "ParameterNormLogger"),
}
"""Metric → (stem of the file, keys under which a record may have the numbers, the callback that writes it)."""


_SEARCHED = 10  # first records of a file that show whether it has a metric


def read_parameters(log: Path, run: str, metric: str, skipped: Skipped) -> ParameterSeries:
    """Read this metric from ``log`` itself, or else from the log beside it that usually has it."""
    expect_known("metric of parameters", [metric], WHERE)
    stem, keys, writer = WHERE[metric]
    beside = [log.with_name(f"{stem}{suffix}") for suffix in (".jsonl", ".json")]
    path = log if _has(log, keys) else next((each for each in beside if each.exists()), None)
    if path is None:
        raise NotFound(f"{beside[0]}: no such log; the callback {writer} writes it")
    records = own_records(path, skipped)
    found = [
        (record["global_step"], norms)
        for record in records
        for norms in [record[key] for key in keys if isinstance(record.get(key), dict)][:1]
    ]
    names = tuple(dict.fromkeys(name for _, norms in found for name in norms))
    values = [[norms[name] if is_number(norms.get(name)) else np.nan for name in names] for _, norms in found]
    return ParameterSeries(
        name=metric,
        run=run,
        parameters=names,
        steps=np.array([step for step, _ in found], np.int64),
        values=np.array(values, np.float64).reshape(len(found), len(names)),
    )


def _has(log: Path, keys: Sequence[str]) -> bool:
    """Whether the first records have one of these keys for each parameter."""
    if log.suffix not in (".json", ".jsonl"):
        return False
    first = islice(read_records(log, ReadReport()), _SEARCHED)
    return any(isinstance(record.get(key), dict) for record in first for key in keys)
