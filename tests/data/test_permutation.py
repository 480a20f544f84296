"""The shuffle is a permutation of any length, the same everywhere, and looks like one drawn at random."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.data.permutation import Indices, permute
from dalsegno.distributed.rng import mix

keys = st.integers(0, 2**63 - 1)


def positions(*numbers: int) -> Indices:
    return np.array(numbers, dtype=np.uint64)


def whole(length: int, key: int) -> list[int]:
    return permute(np.arange(length, dtype=np.uint64), length, key).tolist()


def too_high(chi_square: float, freedom: int) -> bool:
    """More than five standard deviations above what chance gives."""
    return chi_square > freedom + 5 * math.sqrt(2 * freedom)


@settings(max_examples=60)
@given(length=st.integers(1, 3000), key=keys)
def test_every_index_comes_exactly_once(length: int, key: int) -> None:
    assert sorted(whole(length, key)) == list(range(length))


@settings(max_examples=40)
@given(length=st.integers(1, 2**63), key=keys, data=st.data())
def test_any_position_alone_gives_what_it_gives_among_others(length: int, key: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    together = permute(positions(*some), length, key).tolist()
    assert together == [permute(positions(one), length, key).item() for one in some]
    assert len(set(together)) == len(some)
    assert all(0 <= index < length for index in together)


def test_positions_are_left_as_they_were() -> None:
    given = positions(0, 1, 2)
    permute(given, 3, 1)
    assert given.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("length", "first_five"),
    [
        (5, [1, 2, 0, 4, 3]),
        (10, [0, 1, 7, 5, 8]),
        (1000, [238, 640, 832, 293, 32]),
        (10_000_000, [1851768, 7017585, 571289, 3025978, 1642357]),
        (10_000_000_000, [5319787187, 2220154651, 4410563853, 1155040728, 3376119332]),
        (
            2**63,
            [7759362140485108300, 3072093148246979291, 5625547461985966724, 8581501084766615126, 793197224128139407],
        ),
    ],
)
def test_golden_values(length: int, first_five: list[int]) -> None:
    """The places that old runs have saved count on these: they must never change."""
    assert permute(np.arange(5, dtype=np.uint64), length, 42).tolist() == first_five


def test_golden_seeds() -> None:
    assert mix(0) == 8147104208329303767
    assert mix(1, 2, 3) == 7510213797696614745
    assert mix(-1) == mix(2**64 - 1) == 8245168133484221968


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_all_orders_of_few_samples_are_equally_likely(length: int) -> None:
    orders = math.factorial(length)
    trials = max(1500, 5 * orders)
    seen = Counter(tuple(whole(length, key)) for key in range(trials))
    expected = trials / orders
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(length)))
    assert not too_high(chi_square, orders - 1)


def test_every_sample_comes_at_every_position_equally_often() -> None:
    length, trials = 50, 2000
    counts = np.zeros((length, length))
    for key in range(trials):
        counts[np.arange(length), whole(length, key)] += 1
    expected = trials / length
    assert not too_high(((counts - expected) ** 2 / expected).sum(), (length - 1) ** 2)


def test_neighbours_are_unrelated() -> None:
    length = 100_003
    order = np.array(whole(length, 7), dtype=np.float64)
    for lag in (1, 2, 256, 4096):
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) * math.sqrt(length) < 5
    assert abs((np.diff(order) > 0).mean() - 0.5) * math.sqrt(length) < 5
    steps = np.histogram(np.diff(order) % length, bins=100)[0]
    assert not too_high(((steps - length / 100) ** 2 / (length / 100)).sum(), 99)


def test_other_keys_give_other_orders() -> None:
    orders = {tuple(whole(1000, key)) for key in (0, 1, 2, 2**62, 2**62 + 1)}
    assert len(orders) == 5
    matches = np.mean([a == b for a, b in zip(whole(10_000, 1), whole(10_000, 2), strict=True)])
    assert matches < 10 / 10_000
