"""The largest and the smallest numbers that there are: what is asked of them is answered, and nothing warns."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import dalsegno as ds
from dalsegno.analysis import sketch_logs, smooth
from dalsegno.analysis.series import trailing_mean

LARGEST, SMALLEST = 1.7e308, 5e-324

RUNS = {
    "either sign": lambda dice, step: dice.choice([LARGEST, -LARGEST, 1.0, 2.0]),
    "large": lambda dice, step: LARGEST * dice.uniform(0.9, 1.0),
    "leaps": lambda dice, step: dice.uniform(1.0, 2.0) if step < 300 else LARGEST,
    "small": lambda dice, step: dice.choice([SMALLEST, 1e-310, 0.0]),
}

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=RUNS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> ds.TrainingLog:
    return _log(request.param, tmp_path)


def _log(name: str, folder: Path) -> ds.TrainingLog:
    dice = random.Random(1)
    records = [{"step": step, "loss": RUNS[name](dice, step), "time": 1.7e9 + step} for step in range(1, 400)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ds.open_log(path)


def test_a_summary(log: ds.TrainingLog) -> None:
    loss = log.summary().loss
    assert loss is not None
    assert loss.average is not None
    assert loss.best is not None
    assert loss.worst is not None
    assert math.isfinite(loss.average)
    assert loss.best <= loss.average <= loss.worst


def test_means_stay_within_the_values(log: ds.TrainingLog) -> None:
    values = log.metric("loss").values
    for window in (2, 7, 100, 1000):
        for means in (smooth(values, window), trailing_mean(values, window)):
            np.testing.assert_allclose(means, means.clip(values.min(), values.max()), rtol=1e-12)


def test_a_leap_to_the_largest_number_is_a_spike(tmp_path: Path) -> None:
    (spike,) = ds.find_spikes(_log("leaps", tmp_path).metric("loss"))[:1]
    assert (spike.first_step, spike.value) == (300, LARGEST)


def test_a_comparison(log: ds.TrainingLog, tmp_path: Path) -> None:
    loss = log.metric("loss")
    assert ds.compare_series(loss, loss).same
    other = _log("leaps", tmp_path).metric("loss")
    assert ds.compare_series(loss, other).differs_at in (None, 1)


def test_a_search_for_settings(tmp_path: Path) -> None:
    runs = [_log(name, tmp_path).metric("loss") for name in ("small", "leaps")]
    assert ds.sweep_settings(runs[:1], runs[1:])[0].errors == 0


def test_pictures(log: ds.TrainingLog) -> None:
    assert log.name in log._repr_html_()
    for line in sketch_logs([log], width=60, colours=False).split("\n"):
        assert len(line) <= 60
