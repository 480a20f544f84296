"""Comparison of two runs: record by record (diff_records), and curve by curve (compare_series)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dalsegno.errors import ConfigurationError
from dalsegno.logs import is_wall_clock
from dalsegno.stateful.annotations import check_types

from .series import Series, mean, smooth

Record = Mapping[str, Any]


class Missing:
    """Value of a field that a record does not have."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()

_PLAIN = {float, int, str, bool, type(None)}


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field whose values differ."""

    field: str
    """Name, or path of a nested field: ``norms.head.weight``, ``history[3]``."""
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """Two matching records that differ, or a record without a match."""

    step: int | None
    """None for records without one, such as headers."""
    kind: str
    fields: tuple[FieldDifference, ...]
    """Empty if only one log has the record."""
    only_in: str | None = None
    """``"first"`` or ``"second"`` if the other log lacks the record."""


@check_types
def diff_records(first: Iterable[Record], second: Iterable[Record]) -> Iterator[RecordDifference]:
    """The differences between two logs, in the order of steps. Memory holds the records of one step.

    Records match if they have the same ``global_step`` and ``kind``. Wall-clock fields are ignored (see
    :func:`~dalsegno.logs.is_wall_clock`); numbers must have the same type and bits, and NaN equals NaN.
    """
    groups = [groupby(records, key=_step) for records in (first, second)]
    heads = [_next(each) for each in groups]
    while (step := min(step for step, _ in heads)) < math.inf:
        yield from _in_step(*(records if at == step else [] for at, records in heads))
        heads = [_next(each) if head[0] == step else head for each, head in zip(groups, heads, strict=True)]


def _next(groups: Iterator[tuple[int, Iterator[Record]]]) -> tuple[float, list[Record]]:
    """The next step and its records; infinity behind the last."""
    return next(((step, list(records)) for step, records in groups), (math.inf, []))


def _in_step(first: list[Record], second: list[Record]) -> Iterator[RecordDifference]:
    for kind in dict.fromkeys(map(_kind, [*first, *second])):
        pairs = zip_longest(*([record for record in each if _kind(record) == kind] for each in (first, second)))
        for mine, yours in pairs:
            step = (mine or yours).get("global_step")
            if mine is None or yours is None:
                yield RecordDifference(step, kind, (), only_in="second" if mine is None else "first")
            elif fields := tuple(_fields(mine, yours)):
                yield RecordDifference(step, kind, fields)


def _fields(mine: Record, yours: Record) -> Iterator[FieldDifference]:
    for name in mine if mine.keys() == yours.keys() else {**mine, **yours}:
        ours, theirs = mine.get(name, MISSING), yours.get(name, MISSING)
        if type(ours) in _PLAIN and _same(ours, theirs):
            continue  # fast path: nearly every field of a log
        if not is_wall_clock(name):
            yield from _inside(name, ours, theirs)


def _inside(name: str, ours: Any, theirs: Any) -> Iterator[FieldDifference]:
    """The differences between two fields, down to their leaves."""
    mine, yours = dict(_leaves(ours, name)), dict(_leaves(theirs, name))
    for path in {**mine, **yours}:
        first, second = mine.get(path, MISSING), yours.get(path, MISSING)
        if not _same(first, second):
            yield FieldDifference(path, first, second)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(tree, list) and tree:
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    elif tree is not MISSING:
        yield path, tree


def _same(ours: Any, theirs: Any) -> bool:
    return type(ours) is type(theirs) and bool(ours == theirs or (ours != ours and theirs != theirs))


def _step(record: Record) -> int:
    """The step of a record; -1 without one, so that such records come first."""
    step = record.get("global_step")
    return step if isinstance(step, int) else -1


def _kind(record: Record) -> str:
    return str(record.get("kind", "train"))


Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

SECOND_DIFFERENCE = math.sqrt(math.pi / 2 / 6)
"""Factor from the mean absolute second difference of independent normal noise to its standard deviation."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing one metric of two runs. A step is None if there is no such step."""

    records: int
    """Number of compared steps."""
    interpolated: bool
    """Whether the runs logged at different steps, so that one of them is linearly interpolated."""
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


def align(first: Series, second: Series) -> tuple[Steps, Floats, Floats, bool]:
    """Common steps, ascending, the values of both series there, and whether one of them is linearly interpolated.

    The last value of a repeated step is used. The steps are those in both series; if these are fewer than half of the
    sparser series' steps within the common range, the latter are used and the denser series is interpolated.
    """
    (steps_a, a), (steps_b, b) = _each_step_once(first), _each_step_once(second)
    common, in_a, in_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    sparser = common
    if len(steps_a) and len(steps_b):
        begin, end = max(steps_a[0], steps_b[0]), min(steps_a[-1], steps_b[-1])
        sparser = min((steps[(steps >= begin) & (steps <= end)] for steps in (steps_a, steps_b)), key=len)
    if 2 * len(common) >= len(sparser):
        return common, a[in_a], b[in_b], False
    return sparser, np.interp(sparser, steps_a, a), np.interp(sparser, steps_b, b), True


@check_types
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
    steps, one, other, is_interpolated = align(first, second)
    n = len(steps)
    if window is None:
        window = min(max(1, n // 20), 50)
    if not n:
        return Comparison(0, False, window, None, None, None, math.nan, math.nan, math.nan, math.nan)
    unlike = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    with np.errstate(invalid="ignore", over="ignore"):
        noise = np.hypot(_noise(one, window), _noise(other, window)) / math.sqrt(window)
        outside = np.abs(smooth(other - one, window)) > sigmas * noise
    broken = np.isfinite(one) != np.isfinite(other)
    last = slice(max(0, n - window), n)
    ours, theirs = mean(one[last]), mean(other[last])
    return Comparison(
        records=n,
        interpolated=is_interpolated,
        window=window,
        differs_at=_first_step(steps, unlike),
        parts_at=_first_step(steps, broken | _lasting(outside, window // 2 + 1)),
        last_step=int(steps[-1]),
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
