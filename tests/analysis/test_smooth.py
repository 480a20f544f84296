"""Moving means: the ones a loop would compute, at any length, width and hole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.series import INF, NAN
from dalsegno.analysis.series import automatic_window, smooth, trailing_mean
from dalsegno.errors import ConfigurationError

VALUES = st.one_of(st.floats(-100, 100), st.sampled_from([NAN, INF, -INF]))


@given(st.lists(VALUES, max_size=60), st.integers(1, 80))
def test_it_is_the_mean_around_each_value(values: list[float], window: int) -> None:
    half = window // 2
    around = [values[max(0, index - half) : index + min(half, index) + 1] for index in range(len(values))]
    means = smooth(np.array(values, np.float64), window)
    np.testing.assert_allclose(means, list(map(_mean, around)), rtol=1e-9, atol=1e-9)


@given(st.lists(VALUES, max_size=60), st.integers(1, 80))
def test_it_is_the_mean_up_to_each_value(values: list[float], window: int) -> None:
    before = [values[max(0, index + 1 - window) : index + 1] for index in range(len(values))]
    means = trailing_mean(np.array(values, np.float64), window)
    np.testing.assert_allclose(means, list(map(_mean, before)), rtol=1e-9, atol=1e-9)


def _mean(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else NAN


def test_a_huge_value_is_forgotten_once_the_window_has_passed_it() -> None:
    values = np.full(1000, 2.5)
    values[100] = 1e30
    smoothed = smooth(values, 21)
    assert (smoothed[90:111] > 1e20).all()
    assert (smoothed[:90] == 2.5).all()
    assert (smoothed[111:] == 2.5).all()
    trailing = trailing_mean(values, 21)
    assert (trailing[100:121] > 1e20).all()
    assert (trailing[:100] == 2.5).all() and (trailing[121:] == 2.5).all()


def test_a_steep_start_stays_where_it_is() -> None:
    assert smooth(np.array([10.0, 5.0, 3.0, 2.0, 2.0, 2.0]), 5)[0] == 10.0


def test_widths() -> None:
    assert [automatic_window(records) for records in (10, 199, 200, 5000)] == [1, 1, 5, 50]
    with pytest.raises(ConfigurationError, match="smooth is 0"):
        smooth(np.zeros(3), 0)
