"""Spikes: found where they are, counted as one if they last, and none found in noise."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.series import INF, NAN, falling, series, with_values
from dalsegno.analysis.spikes import find_spikes
from dalsegno.errors import ConfigurationError


def test_noise_and_a_falling_loss_have_none() -> None:
    for seed in range(5):
        assert find_spikes(falling(seed=seed)) == []


def test_a_spike_that_comes_back() -> None:
    calm = falling()
    values = calm.values.copy()
    values[600:604] = [4.0, 7.0, 5.0, 3.5]
    (spike,) = find_spikes(with_values(calm, values))
    assert (spike.step, spike.value) == (calm.steps[601], 7.0)
    assert (spike.first_step, spike.last_step, spike.records) == (calm.steps[600], calm.steps[603], 4)
    assert spike.recovered
    assert spike.sigmas > 30
    assert spike.usual == pytest.approx(2.1, abs=0.1)


def test_a_level_that_stays_is_not_recovered() -> None:
    calm = falling()
    values = calm.values + np.where(np.arange(1000) >= 700, 3.0, 0.0)
    first, *_ = find_spikes(with_values(calm, values))
    assert first.first_step == calm.steps[700]
    assert not first.recovered


def test_what_is_not_finite_always_stands_out_and_spoils_no_median() -> None:
    calm = falling()
    values = calm.values.copy()
    values[5] = NAN
    values[500:505] = NAN
    values[520] = 9.0
    first, second, third = find_spikes(with_values(calm, values))
    assert (first.step, first.records, first.sigmas) == (calm.steps[5], 1, np.inf)
    assert (second.records, second.recovered) == (5, True)
    assert third.step == calm.steps[520]


def test_infinity_for_a_while_hides_no_spike_behind_it() -> None:
    calm = falling()
    values = calm.values.copy()
    values[500:530] = INF
    values[545] = 9.0
    assert [spike.step for spike in find_spikes(with_values(calm, values))] == [calm.steps[500], calm.steps[545]]


def test_an_accuracy_spikes_downwards() -> None:
    calm = falling()
    mirrored = with_values(calm, 10 - calm.values)
    mirrored.values[800] = 1.0
    assert find_spikes(mirrored) == []
    (spike,) = find_spikes(mirrored, mode="max")
    assert spike.step == calm.steps[800]


def test_a_metric_that_stands_still() -> None:
    values = [0.5] * 100
    values[60] += 1e-9
    assert find_spikes(series(values)) == []
    values[60] = 0.6
    assert [spike.step for spike in find_spikes(series(values))] == [610]


def test_short_and_wrong() -> None:
    assert find_spikes(series([])) == []
    assert find_spikes(series([1.0, 100.0, 1.0])) == []
    with pytest.raises(ConfigurationError, match="window is 3"):
        find_spikes(series([1.0]), window=3)
    with pytest.raises(ConfigurationError, match="sigmas is 0"):
        find_spikes(series([1.0]), sigmas=0)
