"""The mathematics of divergence, against a plain reading of its definition."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.analysis.divergence import LOST, NOISE, DetectorSettings, Divergence
from dalsegno.errors import ConfigurationError, StateMismatch

values = st.floats(-20, 20) | st.sampled_from([math.nan, math.inf, -math.inf])
series = st.lists(values, max_size=40)
settings_of_it = st.fixed_dictionaries(
    {
        "smoothing": st.floats(0.05, 1),
        "threshold": st.none() | st.floats(0.1, 10),
        "relative_threshold": st.none() | st.floats(1.01, 5),
        "patience": st.integers(1, 4),
        "warmup": st.integers(0, 6),
        "mode": st.sampled_from(["min", "max"]),
        "baseline_smoothing": st.none() | st.floats(0.01, 0.04),
    }
)


def detector(**settings: Any) -> Divergence:
    return Divergence(DetectorSettings(**settings))


def diverged(found: Divergence, observations: list[float]) -> list[bool]:
    return [found.observe(x).diverged for x in observations]


def as_defined(observations: list[float], it: dict[str, Any]) -> list[bool]:
    """The definition read out loud, with the whole past at hand at each observation."""
    answers: list[bool] = []
    seen: list[float] = []
    smoothed: list[float] = []
    slow: list[float] = []
    bad = 0
    a, b = it["smoothing"], it["baseline_smoothing"]
    for x in observations:
        if not math.isfinite(x):
            bad = 0
            answers.append(True)
            continue
        x = x if it["mode"] == "min" else -x
        seen.append(x)
        smoothed.append(a * x + (1 - a) * smoothed[-1] if smoothed else x)
        slow.append((b or 0) * x + (1 - (b or 0)) * slow[-1] if slow else x)
        s, base = smoothed[-1], min(smoothed) if b is None else slow[-1]
        far = it["threshold"] is not None and s - base >= it["threshold"]
        factor = it["relative_threshold"]
        multiple = factor is not None and s > base and s - base >= abs(base) * (factor - 1)
        if it["threshold"] is None and factor is None:
            far = min(s, x) - base > max(LOST * (seen[0] - base), NOISE * noise(seen, a))
        bad = bad + 1 if (far or multiple) and len(smoothed) > it["warmup"] else 0
        answers.append(bad == it["patience"])
        bad %= it["patience"]
    return answers


def noise(seen: list[float], smoothing: float) -> float:
    """Of an exponential average: from the distances of neighbours, none of them over four times what is usual."""
    usual = 0.0
    for number, distance in enumerate((abs(y - x) for x, y in pairwise(seen)), start=1):
        counted = min(distance, 4 * usual) if usual > 0 and number >= 5 else distance
        usual += max(0.05, 1 / number) * (counted - usual)
    return math.sqrt(math.pi) / 2 * usual * math.sqrt(smoothing / (2 - smoothing))


@settings(max_examples=200)
@given(observations=series, it=settings_of_it)
def test_it_is_the_definition(observations: list[float], it: dict[str, Any]) -> None:
    assert diverged(detector(**it), observations) == as_defined(observations, it)


@settings(max_examples=60)
@given(observations=series, it=settings_of_it, cut=st.integers(0, 40))
def test_interrupted_anywhere_it_goes_on_as_if_it_had_not_been(
    observations: list[float], it: dict[str, Any], cut: int
) -> None:
    before, after = detector(**it), detector(**it)
    first = diverged(before, observations[:cut])
    after.load_state_dict(before.state_dict())
    assert first + diverged(after, observations[cut:]) == diverged(detector(**it), observations)


@settings(max_examples=60)
@given(observations=series, it=settings_of_it)
def test_the_other_mode_is_the_mirror(observations: list[float], it: dict[str, Any]) -> None:
    mirrored = {**it, "mode": "max" if it["mode"] == "min" else "min"}
    negated = [-x for x in observations]
    assert diverged(detector(**it), observations) == diverged(detector(**mirrored), negated)


def test_a_rising_accuracy_is_no_divergence_and_a_falling_one_is() -> None:
    found = detector(smoothing=1, threshold=0.3, patience=2, warmup=0, mode="max")
    assert diverged(found, [0.1, 0.5, 0.9]) == [False] * 3
    verdict = [found.observe(x) for x in (0.5, 0.6)][-1]
    assert verdict.diverged
    assert (verdict.smoothed, verdict.best, verdict.bad_in_a_row) == (0.6, 0.9, 2)
    assert verdict.reason == "its moving average 0.6 has left its best 0.9 by at least 0.3, 2 observations in a row"


def test_a_negative_best_and_a_best_of_zero() -> None:
    relative = {"smoothing": 1.0, "threshold": None, "relative_threshold": 1.5, "patience": 1, "warmup": 0}
    assert diverged(detector(**relative), [-4, -3, -2.5, -2, -1]) == [False, False, False, True, True]
    assert diverged(detector(**relative), [4, 5.9, 6]) == [False, False, True]
    assert diverged(detector(**relative), [0, 0, 0]) == [False] * 3


def test_a_single_spike_needs_company() -> None:
    found = detector(smoothing=1, threshold=1.0, patience=2, warmup=0)
    assert diverged(found, [1, 9, 1, 9, 1, 9, 9]) == [False] * 6 + [True]


def test_nothing_is_judged_in_warmup_but_nan() -> None:
    found = detector(smoothing=1, threshold=1.0, patience=1, warmup=3)
    assert diverged(found, [1, 9, math.inf, 9, 9]) == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("smoothing", 0, "over 0, up to 1"),
        ("smoothing", 1.01, "over 0, up to 1"),
        ("smoothing", math.nan, "over 0, up to 1"),
        ("smoothing", "0.3", "over 0, up to 1"),
        ("threshold", math.nan, "finite number over 0, or None"),
        ("threshold", 0.0, "finite number over 0, or None"),
        ("threshold", math.inf, "finite number over 0, or None"),
        ("relative_threshold", math.nan, "finite number over 1, or None"),
        ("relative_threshold", 1, "finite number over 1, or None"),
        ("patience", 0, "at least 1"),
        ("patience", 2.5, "integer"),
        ("warmup", -1, "at least 0"),
        ("warmup", True, "integer"),
        ("mode", "maximum", "'min' or 'max'"),
        ("baseline_smoothing", 0.3, "over 0 and under smoothing, which is 0.3, or None"),
    ],
)
def test_a_value_that_cannot_work(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detector(**{argument: value})
    assert str(caught.value).startswith(f"{argument} is {value!r}; allowed: ")
    assert allowed in str(caught.value)


def noisy(level: float, count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [level + generator.gauss(0, 0.1) for _ in range(count)]


falling = [8 * 0.97**step + noise for step, noise in enumerate(noisy(2.0, 300, 0))]


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("shift", [0.0, -50.0])
def test_without_a_threshold_every_unit_is_judged_alike(unit: float, shift: float) -> None:
    """A healthy run is let pass, noise and all; one that climbs back a part of its way is not."""
    healthy = [unit * (x + shift) for x in [*falling, *noisy(2.2, 3000, 1)]]
    assert not any(diverged(detector(), healthy))
    climbing = [unit * (x + shift) for x in [*falling, *(2 + 0.1 * step for step in range(80))]]
    fired = diverged(detector(), climbing).index(True)
    assert 300 + 20 < fired < 300 + 40  # a quarter of 8 is lost after 20 observations; s follows a little later


def test_noise_alone_is_no_divergence_where_nothing_was_gained() -> None:
    for seed in range(20):
        assert not any(diverged(detector(), noisy(1.0, 2000, seed)))


def test_a_slow_average_forgives_an_old_best() -> None:
    rising = [*noisy(1.0, 50, 0), *(1 + 0.01 * step for step in range(400))]
    assert any(diverged(detector(threshold=1.0), rising))
    assert not any(diverged(detector(threshold=1.0, baseline_smoothing=0.05), rising))
    assert any(diverged(detector(threshold=1.0, baseline_smoothing=0.05), [*rising, *[9.0] * 5]))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "a dict with the keys smoothed, best, first, newest, step, observations, bad_in_a_row"),
        ({"smoothed": 1.0}, "has no 'best'; its keys must be"),
        ({**detector().state_dict(), "smoothed": "1"}, "smoothed: is '1'; must be a number or None"),
        ({**detector().state_dict(), "observations": None}, "observations: is None; must be a 64-bit integer"),
    ],
)
def test_a_state_that_is_none(state: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        detector().load_state_dict(state)
