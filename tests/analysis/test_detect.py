"""The detector over past logs: what the live one would have judged; and the settings a sweep finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.series import NAN, falling, series, with_values
from dalsegno.analysis import Series
from dalsegno.analysis.divergence import DetectorSettings, Divergence
from dalsegno.analysis.replay import SMOOTHING, _Track, detect_divergence, sweep_settings
from dalsegno.errors import ConfigurationError


def diverging(seed: int = 0) -> Series:
    calm = falling(seed=seed)
    return with_values(calm, calm.values + np.clip((np.arange(1000) - 600) * 0.02, 0, None))


def test_it_fires_where_the_live_detector_would_have() -> None:
    log = diverging()
    live = Divergence(DetectorSettings())
    fired = [step for step, value in zip(log.steps, log.values, strict=True) if live.observe(value).diverged]
    found = detect_divergence(log)
    assert [firing.step for firing in found.firings] == fired
    assert found.fired is not None and found.fired.step == fired[0] and 6500 < fired[0] < 7000
    assert found.fired.step == 10 * found.fired.observation
    assert "has left its best" in found.fired.reason


def test_a_good_run_and_an_empty_one() -> None:
    assert detect_divergence(falling()).fired is None
    assert detect_divergence(series([])).observations == 0


def test_a_run_that_is_all_warm_up_is_said_to_be() -> None:
    found = detect_divergence(series([5.0] * 10), DetectorSettings(warmup=10))
    assert (found.judged, found.fired) == (0, None)
    assert found.reason == "nothing to judge: 10 records, all within the warm-up"
    assert detect_divergence(series([5.0] * 11), DetectorSettings(warmup=10)).reason is None
    assert detect_divergence(series([NAN]), DetectorSettings(warmup=10)).fired


def test_settings_are_checked_as_the_detector_checks_them() -> None:
    with pytest.raises(ConfigurationError, match="patience is 0"):
        DetectorSettings(patience=0)
    with pytest.raises(
        ConfigurationError, match=r"baseline_smoothing is 0\.3; allowed: a number over 0 and under smooth"
    ):
        DetectorSettings(baseline_smoothing=0.3)


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=60),
    st.sampled_from(SMOOTHING),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([0, 3]),
    st.sampled_from(["min", "max"]),
)
def test_what_a_run_shows_is_the_largest_threshold_that_fires(
    values: list[float], smoothing: float, patience: int, warmup: int, mode: str
) -> None:
    shown = _Track(np.array(values), smoothing, mode).shown("threshold", patience, warmup)  # type: ignore[arg-type]
    for threshold, fires in ((shown * 0.999, True), (shown * 1.001, False)):
        if threshold > 1e-9:
            settings = DetectorSettings(
                smoothing=smoothing, threshold=threshold, patience=patience, warmup=warmup, mode=mode
            )  # type: ignore[arg-type]
            assert (detect_divergence(series(values), settings).fired is not None) == fires


def test_a_sweep_separates_what_can_be_separated() -> None:
    good = [falling(seed=seed) for seed in range(4)]
    broken = falling(seed=9)
    bad = [diverging(seed=7), with_values(broken, [*broken.values[:-1], NAN])]
    candidates = sweep_settings(good, bad)
    best = candidates[0]
    assert best.errors == 0
    assert best.margin > 5
    assert best.fires_at is not None and 0.6 < best.fires_at < 1
    assert all(detect_divergence(run, best.settings).fired is None for run in good)
    assert all(detect_divergence(run, best.settings).fired is not None for run in bad)
    assert [each.errors for each in candidates] == sorted(each.errors for each in candidates)


def test_what_cannot_be_separated_has_errors_and_says_so() -> None:
    candidates = sweep_settings([diverging(seed=1), falling()], [falling(seed=2)])
    assert candidates[0].errors == 1
    assert candidates[0].margin < 1


def test_bad_runs_of_nan_only_have_no_limit() -> None:
    broken = with_values(falling(), [*falling().values[:500], *[NAN] * 500])
    best = sweep_settings([falling(seed=1)], [broken])[0]
    assert (best.errors, best.margin) == (0, math.inf)


def test_a_sweep_needs_both_kinds() -> None:
    with pytest.raises(ConfigurationError, match="both good and bad runs"):
        sweep_settings([falling()], [])
