"""A small share of ``python -m durability.requests``: requests of every kind, and a training that is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from durability.requests import all_outcomes


def test_no_request_breaks_the_server_or_acts_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    outcome = all_outcomes(400, seed=1, folder=tmp_path)
    assert outcome.failures == []
    assert outcome.acted_without_token == []
    assert outcome.same_weights
    assert sum(outcome.statuses.values()) == 400
    assert {"200", "400", "401", "404", "405"} <= set(outcome.statuses)
