"""Round numbers along an axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.analysis.plotting.pixels import log_ticks, nice_ticks, tick_label


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e6), st.integers(2, 9))
def test_they_lie_within_and_are_evenly_spaced(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most + 1
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    gaps = [right - left for left, right in pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-3) if gaps else True


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 5, 10]), (1.2, 4.9, [2, 4]), (0, 1000, [0, 500, 1000]), (3, 3, [3])]
)
def test_they_are_round(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high, 3) == expected


def test_powers_and_their_labels() -> None:
    assert log_ticks(0.5, 2e4, 5) == [1, 10, 100, 1000, 10000]
    assert log_ticks(1.5, 9, 5) == [2, 5]
    assert log_ticks(2.105, 2.16, 5) == pytest.approx([2.12, 2.14, 2.16])
    assert [tick_label(*pair) for pair in [(1500, 500), (0.25, 0.05), (2e9, 1e9), (0, 1e-9), (3e-5, 1e-5)]] == [
        "1,500",
        "0.25",
        "2e+09",
        "0.000000000",
        "3e-05",
    ]
