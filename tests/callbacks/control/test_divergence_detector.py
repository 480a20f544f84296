"""DivergenceDetector: which records it looks at, and what it asks for."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from callbacks.stage import Stage
from dalsegno.callbacks import DivergenceDetector, forgather
from dalsegno.errors import ConfigurationError


def watched(tmp_path: Path, **arguments: Any) -> Stage:
    return Stage(
        tmp_path, DivergenceDetector(**{"smoothing": 1.0, "threshold": 1.0, "warmup": 0, "patience": 2, **arguments})
    )


def feed(stage: Stage, *values: float, metric: str = "loss", kind: str = "train", first: int = 1) -> None:
    for step, value in enumerate(values, start=first):
        stage.log(step, kind, **{metric: value})


def test_stop_saves_and_says_who_asked_and_why(tmp_path: Path) -> None:
    stage = watched(tmp_path)
    feed(stage, 3.0, 2.0, 3.1)
    assert not stage.control.should_training_stop
    feed(stage, 3.2, first=4)
    assert stage.control.should_training_stop
    assert not stage.control.should_abort_without_save
    assert stage.control.stopped_by == "DivergenceDetector"
    assert stage.control.stop_reason == (
        "loss diverged at step 4: its moving average 3.2 has left its best 2 by at least 1, 2 observations in a row"
    )


def test_abort_saves_nothing_and_nan_needs_no_patience(tmp_path: Path) -> None:
    stage = watched(tmp_path, action="abort", warmup=100)
    feed(stage, math.nan)
    assert stage.control.should_abort_without_save
    assert stage.control.stop_reason == "loss diverged at step 1: the value is nan"


@pytest.mark.parametrize(
    ("arguments", "metric", "kind"),
    [
        ({}, "loss", "train"),
        ({"metric_key": "aux"}, "aux", "train"),
        ({"use_eval_loss": True}, "eval_loss", "eval"),
        ({"use_eval_loss": True, "metric_key": "perplexity"}, "perplexity", "eval"),
        ({"metric_key": "eval_top1", "mode": "max", "threshold": 0.5}, "eval_top1", "eval"),
    ],
)
def test_it_looks_at_one_metric_of_one_kind(tmp_path: Path, arguments: dict[str, Any], metric: str, kind: str) -> None:
    worse = (5, 0, -1, -2) if arguments.get("mode") == "max" else (0, 5, 6, 7)
    for other_kind in {"train", "eval", "final", "user"} - {kind}:
        stage = watched(tmp_path, **arguments)
        feed(stage, *worse, metric=metric, kind=other_kind)
        assert not stage.control.should_training_stop, other_kind
    stage = watched(tmp_path, **arguments)
    feed(stage, *worse, metric=metric, kind=kind)
    assert stage.control.should_training_stop


def test_a_missing_metric_is_said_once_and_zero_is_not_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = watched(tmp_path)
    with caplog.at_level(logging.WARNING, "dalsegno"):
        feed(stage, 1, 2, metric="lr")
    assert len(caplog.messages) == 1
    assert "no 'loss' in the train record of step 1 (it has lr)" in caplog.text
    feed(stage, 0.0, 0.0, 1.5, 1.5)
    assert stage.control.should_training_stop
    assert len(caplog.messages) == 1


def test_resumed_from_the_checkpoint_of_its_stop_it_needs_new_observations(tmp_path: Path) -> None:
    stage = Stage(tmp_path, callback := DivergenceDetector(smoothing=1.0, threshold=1.0, warmup=0, patience=3))
    feed(stage, 1, 9, 9, 9)
    assert stage.control.should_training_stop
    state = callback.state_dict()

    resumed = Stage(tmp_path, again := DivergenceDetector(smoothing=1.0, threshold=1.0, warmup=0, patience=3))
    again.load_state_dict(state)
    feed(resumed, 9, 9)
    assert not resumed.control.should_training_stop
    feed(resumed, 9)
    assert resumed.control.should_training_stop


def test_an_unknown_action() -> None:
    with pytest.raises(ConfigurationError, match="action is 'halt'; allowed: 'stop', 'abort' or 'rollback'"):
        DivergenceDetector(action="halt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("detector", "losses", "stops"),
    [
        (forgather.DivergenceDetector(smoothing=1.0), [3.0] * 10 + [3.9] * 3, False),
        (forgather.DivergenceDetector(smoothing=1.0), [3.0] * 10 + [4.1] * 3, True),
        (forgather.DivergenceDetector(smoothing=1.0, relative_threshold=1.5), [1.0] * 10 + [1.6] * 3, True),
        (forgather.DivergenceDetector(smoothing=1.0, relative_threshold=1.5), [3.0] * 10 + [4.1] * 3, True),
    ],
)
def test_forgathers_defaults(tmp_path: Path, detector: DivergenceDetector, losses: list[float], stops: bool) -> None:
    """A rise of 1.0 over the best, with or without a factor beside it."""
    stage = Stage(tmp_path, detector)
    feed(stage, *losses)
    assert stage.control.should_training_stop is stops
