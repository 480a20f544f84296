"""Two runs step by step: aligned, held apart from noise, and parted where they part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.series import NAN, falling, series, with_values
from dalsegno.analysis import Series
from dalsegno.analysis.comparison import align, compare_series
from dalsegno.errors import ConfigurationError

LOGGED = st.lists(st.tuples(st.integers(0, 40), st.floats(-10, 10)), max_size=30)


def of(pairs: list[tuple[int, float]]) -> Series:
    return series([value for _, value in pairs], [step for step, _ in pairs])


@given(LOGGED, LOGGED)
def test_alignment(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> None:
    steps, ours, theirs, interpolated = align(of(first), of(second))
    last_of_first, last_of_second = dict(first), dict(second)
    assert (np.diff(steps) > 0).all()
    assert len(steps) == len(ours) == len(theirs)
    if interpolated:
        for values, known in ((ours, last_of_first), (theirs, last_of_second)):
            for step, value in zip(steps.tolist(), values, strict=True):
                assert min(known) <= step <= max(known)
                assert value == pytest.approx(known.get(step, value))
                assert min(known.values()) - 1e-9 <= value <= max(known.values()) + 1e-9
    else:
        common = sorted(last_of_first.keys() & last_of_second.keys())
        assert steps.tolist() == common
        assert ours.tolist() == [last_of_first[step] for step in common]
        assert theirs.tolist() == [last_of_second[step] for step in common]


def test_runs_that_log_at_other_steps_are_read_between_them() -> None:
    dense, sparse = series([*range(100)], [*range(0, 500, 5)]), series([*range(14)], [*range(3, 500, 36)])
    steps, ours, _, interpolated = align(dense, sparse)
    assert interpolated
    assert steps.tolist() == sparse.steps.tolist()
    assert ours.tolist() == pytest.approx([step / 5 for step in steps.tolist()])


def test_a_run_and_itself() -> None:
    result = compare_series(falling(), falling())
    assert result.same
    assert (result.records, result.parts_at, result.difference) == (1000, None, 0.0)


def test_noise_alone_parts_nobody() -> None:
    for seed in range(40):
        result = compare_series(falling(seed=seed), falling(seed=1000 + seed))
        assert result.differs_at == 10
        assert result.parts_at is None, seed
        assert abs(result.difference) < 4 * result.noise


def test_they_part_behind_the_step_where_one_begins_to_leave() -> None:
    for seed in range(20):
        away = np.where(np.arange(1000) >= 500, (np.arange(1000) - 500) * 0.01, 0.0)
        ours, theirs = falling(seed=seed), falling(seed=1000 + seed)
        result = compare_series(ours, with_values(theirs, theirs.values + away))
        assert result.parts_at is not None
        assert 4900 <= result.parts_at <= 5600, "a window of 50 records, logged every 10 steps"
        assert result.difference == pytest.approx(4.75, abs=0.1)


def test_rounding_that_grows_differs_long_before_it_parts() -> None:
    ours = falling()
    chaos = 1e-9 * np.exp(np.arange(1000) / 45)
    chaos[:200] = 0
    result = compare_series(ours, with_values(ours, ours.values + chaos))
    assert result.differs_at == ours.steps[200]
    assert result.parts_at is not None and result.parts_at > 7500


def test_nan_in_one_parts_at_once_and_nan_in_both_does_not() -> None:
    ours = falling()
    broken = with_values(ours, [*ours.values[:400], NAN, *ours.values[401:]])
    assert compare_series(ours, broken).parts_at == ours.steps[400]
    assert compare_series(broken, ours).parts_at == ours.steps[400]
    assert compare_series(broken, broken).same


def test_few_records_and_nothing_in_common() -> None:
    assert compare_series(series([1.0, 2.0]), series([1.0, 5.0])).differs_at == 20
    nothing = compare_series(series([1.0], [5]), series([1.0], [10]))
    assert (nothing.records, nothing.same, nothing.last_step) == (0, False, None)
    assert compare_series(series([]), series([1.0])).records == 0


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match="window is 0"):
        compare_series(series([1.0]), series([1.0]), window=0)
    with pytest.raises(ConfigurationError, match="sigmas is -1"):
        compare_series(series([1.0]), series([1.0]), sigmas=-1)
