"""OptunaPruning: with a study in SQLite whose processes are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.logs import read_records
from dalsegno.testing import start_ranks

optuna = pytest.importorskip("optuna")

from callbacks.control import studies  # noqa: E402


def outcomes(folder: Path) -> list[tuple[str, dict[str, Any], dict[int, float], float | None]]:
    trials = studies.study(folder).get_trials()
    return [(trial.state.name, trial.params, trial.intermediate_values, trial.value) for trial in trials]


def test_a_study_that_is_killed_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    studies.run(tmp_path / "whole", {})
    for kills in ({1: 7}, {1: 9, 3: 3}):  # the second process is killed in the trial that it has resumed
        (outcome,) = start_ranks(studies.run, 1, tmp_path / "killed", kills).wait(300)
        assert outcome.was_killed
    studies.run(tmp_path / "killed", {})
    whole = outcomes(tmp_path / "whole")
    assert outcomes(tmp_path / "killed") == whole
    assert sorted(state for state, *_ in whole) == ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED"]
    (pruned,) = [values for state, _, values, _ in whole if state == "PRUNED"]
    assert max(pruned) < 12
    for number in range(4):
        records = [read_records(tmp_path / name / f"trial-{number}/logs/train.jsonl") for name in ("whole", "killed")]
        steps = [[record["global_step"] for record in each if record.get("loss")] for each in records]
        assert steps[0] == steps[1]
