"""Fewer points, and every spike still there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.series import INF, NAN
from dalsegno.analysis.plotting.pixels import downsample

VALUES = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([NAN, INF, -INF]))


@given(st.lists(VALUES, max_size=300), st.integers(1, 12))
def test_what_is_kept(values: list[float], buckets: int) -> None:
    array = np.array(values, np.float64)
    kept = downsample(array, buckets)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= 5 * (buckets + 1)
    if not values:
        return
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    size = -(-len(values) // buckets)
    for begin in range(0, len(values), size):
        all_here, kept_here = array[begin : begin + size], array[kept[(kept >= begin) & (kept < begin + size)]]
        finite, kept_finite = all_here[np.isfinite(all_here)], kept_here[np.isfinite(kept_here)]
        assert len(kept_finite) < len(kept_here) or len(finite) == len(all_here), "a value that is not finite is lost"
        if len(finite):
            assert (kept_finite.min(), kept_finite.max()) == (finite.min(), finite.max())


def test_few_points_stay_all() -> None:
    assert list(downsample(np.arange(10.0), 2)) == list(range(10))


def test_one_record_in_ten_million_is_seen() -> None:
    values = np.random.default_rng(0).normal(size=10_000_000)
    values[[1_234_567, 7_654_321, 9_999_998]] = [50.0, -50.0, NAN]
    kept = downsample(values, 1200)
    assert {1_234_567, 7_654_321, 9_999_998} <= set(kept.tolist())
    assert len(kept) < 6100
