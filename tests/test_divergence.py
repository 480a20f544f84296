"""The mathematics of divergence, against a plain reading of its definition."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.divergence import Divergence
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
    }
).filter(lambda it: it["threshold"] is not None or it["relative_threshold"] is not None)


def diverged(found: Divergence, observations: list[float]) -> list[bool]:
    return [found.observe(x).diverged for x in observations]


def as_defined(observations: list[float], it: dict[str, Any]) -> list[bool]:
    """The definition read out loud, with the whole past at hand at each observation."""
    answers, smoothed, bad = [], [], 0
    for x in observations:
        if not math.isfinite(x):
            bad = 0
            answers.append(True)
            continue
        x = x if it["mode"] == "min" else -x
        a = it["smoothing"]
        smoothed.append(a * x + (1 - a) * smoothed[-1] if smoothed else x)
        s, best = smoothed[-1], min(smoothed)
        far = it["threshold"] is not None and s - best >= it["threshold"]
        factor = it["relative_threshold"]
        multiple = factor is not None and s > best and s - best >= abs(best) * (factor - 1)
        bad = bad + 1 if (far or multiple) and len(smoothed) > it["warmup"] else 0
        answers.append(bad == it["patience"])
        bad %= it["patience"]
    return answers


@settings(max_examples=200)
@given(observations=series, it=settings_of_it)
def test_it_is_the_definition(observations: list[float], it: dict[str, Any]) -> None:
    assert diverged(Divergence(**it), observations) == as_defined(observations, it)


@settings(max_examples=60)
@given(observations=series, it=settings_of_it, cut=st.integers(0, 40))
def test_interrupted_anywhere_it_goes_on_as_if_it_had_not_been(
    observations: list[float], it: dict[str, Any], cut: int
) -> None:
    before, after = Divergence(**it), Divergence(**it)
    first = diverged(before, observations[:cut])
    after.load_state_dict(before.state_dict())
    assert first + diverged(after, observations[cut:]) == diverged(Divergence(**it), observations)


@settings(max_examples=60)
@given(observations=series, it=settings_of_it)
def test_the_other_mode_is_the_mirror(observations: list[float], it: dict[str, Any]) -> None:
    mirrored = {**it, "mode": "max" if it["mode"] == "min" else "min"}
    negated = [-x for x in observations]
    assert diverged(Divergence(**it), observations) == diverged(Divergence(**mirrored), negated)


def test_a_rising_accuracy_is_no_divergence_and_a_falling_one_is() -> None:
    found = Divergence(smoothing=1, threshold=0.3, patience=2, warmup=0, mode="max")
    assert diverged(found, [0.1, 0.5, 0.9]) == [False] * 3
    verdict = [found.observe(x) for x in (0.5, 0.6)][-1]
    assert verdict.diverged
    assert (verdict.smoothed, verdict.best, verdict.bad_in_a_row) == (0.6, 0.9, 2)
    assert verdict.reason == "its moving average 0.6 has left its best 0.9 by at least 0.3, 2 observations in a row"


def test_a_negative_best_and_a_best_of_zero() -> None:
    relative = {"smoothing": 1.0, "threshold": None, "relative_threshold": 1.5, "patience": 1, "warmup": 0}
    assert diverged(Divergence(**relative), [-4, -3, -2.5, -2, -1]) == [False, False, False, True, True]
    assert diverged(Divergence(**relative), [4, 5.9, 6]) == [False, False, True]
    assert diverged(Divergence(**relative), [0, 0, 0]) == [False] * 3


def test_a_single_spike_needs_company() -> None:
    found = Divergence(smoothing=1, patience=2, warmup=0)
    assert diverged(found, [1, 9, 1, 9, 1, 9, 9]) == [False] * 6 + [True]


def test_nothing_is_judged_in_warmup_but_nan() -> None:
    found = Divergence(smoothing=1, patience=1, warmup=3)
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
        ("patience", 2.5, "whole number"),
        ("warmup", -1, "at least 0"),
        ("warmup", True, "whole number"),
        ("mode", "maximum", "'min' or 'max'"),
    ],
)
def test_a_value_that_cannot_work(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Divergence(**{argument: value})
    assert str(caught.value).startswith(f"{argument} is {value!r}; allowed: ")
    assert allowed in str(caught.value)


def test_no_threshold_at_all() -> None:
    with pytest.raises(ConfigurationError, match="threshold and relative_threshold are both None"):
        Divergence(threshold=None)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must have the keys smoothed, best, observations, bad_in_a_row"),
        ({"smoothed": 1.0}, "must have the keys"),
        ({"smoothed": "1", "best": 1.0, "observations": 1, "bad_in_a_row": 0}, "smoothed cannot be '1'"),
        ({"smoothed": 1.0, "best": 1.0, "observations": None, "bad_in_a_row": 0}, "observations cannot be None"),
    ],
)
def test_a_state_that_is_none(state: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        Divergence().load_state_dict(state)
