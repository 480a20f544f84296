"""A run in some twenty numbers. What it says of real runs is kept in tests/golden/logs."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.logs import RunFile


def log_of(folder: Path, records: list[dict[str, Any]]) -> ds.TrainingLog:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"step": n, **each}) + "\n" for n, each in enumerate(records))
    )
    return ds.open_log(folder)


def test_values_that_are_not_finite_are_counted_and_move_nothing(tmp_path: Path) -> None:
    losses = [4.0, math.nan, 2.0, math.inf, 3.0]
    summary = log_of(tmp_path, [{"loss": loss} for loss in losses]).summary()
    loss = summary.loss
    assert loss is not None
    assert (loss.first, loss.final, loss.final_step) == (4.0, 3.0, 4)
    assert (loss.best, loss.best_step, loss.worst, loss.worst_step, loss.average) == (2.0, 2, 4.0, 0, 3.0)
    assert loss.not_finite == 2
    assert summary.state == "unknown"


def test_a_rate_is_weighed_by_time(tmp_path: Path) -> None:
    """After the first interval, whose length is not known, four steps at 100 a second and five at 50."""
    rates = [100.0] * 5 + [50.0] * 5
    summary = log_of(tmp_path, [{"loss": 1.0, "tok_per_sec": rate} for rate in rates]).summary()
    assert summary.throughput == {"tok_per_sec": pytest.approx(9 / (4 / 100 + 5 / 50))}


def test_a_rate_of_steps_is_shown_too(tmp_path: Path) -> None:
    rates = [4.0] * 5 + [2.0] * 5
    summary = log_of(tmp_path, [{"loss": 1.0, "steps_per_second": rate} for rate in rates]).summary()
    assert summary.throughput == {"steps_per_second": pytest.approx(9 / (4 / 4 + 5 / 2))}


def test_a_rate_of_tokens_is_weighed_by_tokens(tmp_path: Path) -> None:
    """Five intervals of 100 tokens and five of 10,000, each of one second."""
    counts = [100.0] * 5 + [10_000.0] * 5
    records = [{"loss": 1.0, "tok_per_sec": count, "tokens": sum(counts[: n + 1])} for n, count in enumerate(counts)]
    summary = log_of(tmp_path, records).summary()
    assert summary.throughput["tok_per_sec"] == pytest.approx(sum(counts[1:]) / 9)


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("eval_MulticlassAccuracy", 0.9),
        ("eval_rougeL", 0.9),
        ("eval_win_rate", 0.9),
        ("eval_loss", 0.1),
        ("val/error_rate", 0.1),
        ("eval_perplexity", 0.1),
        ("eval_MeanSquaredError", 0.1),
        ("eval_logloss", 0.1),
        ("eval_MSELoss", 0.1),
        ("eval_loss2", 0.1),
        ("eval_kl_divergence", 0.1),
        ("eval_on_time_rate", 0.9),
    ],
)
def test_what_is_best_is_one_rule(tmp_path: Path, name: str, best: float) -> None:
    (metric,) = log_of(tmp_path, [{"loss": 1.0, name: value} for value in (0.5, 0.9, 0.1)]).summary().evaluation
    assert metric.best == best
    args = ds.TrainingArguments(tmp_path / "run", max_steps=1, metric_for_best_model=name.removeprefix("val/"))
    assert args.best_is_greater == (best == 0.9)


def test_a_loss_that_ends_as_no_number_has_diverged(tmp_path: Path) -> None:
    summary = log_of(tmp_path, [{"loss": 1.0}, {"loss": math.nan}]).summary()
    assert summary.state == "diverged"
    nothing = log_of(tmp_path, [{"loss": math.nan}]).summary().loss
    assert nothing is not None
    assert (nothing.best, nothing.average, nothing.not_finite) == (None, None, 1)


def test_the_best_accuracy_is_the_highest(tmp_path: Path) -> None:
    records = [{"loss": 1.0}, {"eval_accuracy": 0.5, "eval_loss": 2.0}, {"eval_accuracy": 0.7, "eval_loss": 3.0}]
    evaluation = {each.name: each for each in log_of(tmp_path, records).summary().evaluation}
    assert (evaluation["eval_accuracy"].best, evaluation["eval_loss"].best) == (0.7, 2.0)


def test_an_empty_log(tmp_path: Path) -> None:
    summary = log_of(tmp_path, []).summary()
    assert (summary.loss, summary.step, summary.epoch, summary.training_seconds, summary.records) == (None,) * 4 + ({},)


@pytest.mark.parametrize(
    ("reason", "by", "why", "state"),
    [
        ("finished", None, None, "finished"),
        ("exhausted", None, None, "finished"),
        ("stopped", "MyStop", "enough", "stopped"),
        ("aborted", "Watch", "loss diverged at step 3: the value is nan", "diverged"),
        ("interrupted", None, "KeyboardInterrupt", "stopped"),
        ("exception", None, "ValueError: no", "failed"),
        (None, None, None, "died"),
    ],
)
def test_the_state_is_how_the_last_leg_ended(
    tmp_path: Path, reason: str | None, by: str | None, why: str | None, state: str
) -> None:
    run = RunFile(tmp_path)
    run.begin(None, 1, 0)
    if reason is not None:
        run.end(reason, by, 2, {}, why)
    assert log_of(tmp_path, [{"loss": 1.0}, {"loss": 0.5}]).summary().state == state


@pytest.mark.parametrize(("reason", "lost"), [("finished", 0.0), ("stopped", 1000.0)])
def test_a_finished_run_loses_no_time_until_it_trains_further(tmp_path: Path, reason: str, lost: float) -> None:
    run = RunFile(tmp_path)
    for _ in range(2):
        run.begin(None, 1, 0)
        run.end(reason, None, 2, {})
    content = json.loads(run.path.read_text())
    content["legs"][1]["started"] = content["legs"][0]["ended"] + 1000.0
    content["legs"][1]["ended"] = content["legs"][1]["started"] + 10.0
    run.path.write_text(json.dumps(content))
    assert log_of(tmp_path, [{"loss": 1.0}]).summary().lost_seconds == pytest.approx(lost)


def test_the_state_of_another_users_run_is_what_its_run_json_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run := RunFile(tmp_path)).begin(None, 1, 0)
    log = log_of(tmp_path, [{"loss": 1.0}])
    open_file = os.open

    def denied(path: Any, *args: Any, **named: Any) -> int:
        if Path(path).name == ".lock":  # as if it were another user's; root may open all
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *args, **named)

    monkeypatch.setattr(os, "open", denied)
    assert (log.summary().state, log.lineage()[-1].reason) == ("unknown", "unknown")
    for until, state in {"2099-01-01T00:00:00+00:00": "running", "2026-01-01T00:00:00+00:00": "died"}.items():
        (tmp_path / ".lease").write_text(json.dumps({"token": "0", "until": until}))  # which all may read
        assert log.summary().state == state
    run.end("stopped", "MyStop", 0, {}, "enough")
    assert log.summary().state == "stopped"


def test_one_reading_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path, [{"loss": 1.0, "lr": 0.1, "grad_norm": 2.0}] * 5)
    readings = []
    blocks = log.source.blocks
    monkeypatch.setattr(log.source, "blocks", lambda skipped: readings.append(1) or blocks(skipped))
    log.summary()
    assert log.metric("loss").values.tolist() == [1.0] * 5
    log.summary()
    assert len(readings) == 1


@pytest.mark.filterwarnings("error")
def test_times_and_epochs_that_nobody_knows(tmp_path: Path) -> None:
    summary = log_of(
        tmp_path, [{"loss": 1.0, "epoch": "NaN", "timestamp": 1.7e9}, {"loss": 2.0, "epoch": "NaN"}]
    ).summary()
    assert (summary.epoch, summary.began, summary.changed) == (None, 1.7e9, 1.7e9)
