"""A small share of ``make lies``: whatever a checkpoint claims, it is refused by name, or the run goes on."""

from __future__ import annotations

from pathlib import Path

from durability.lies import all_outcomes, is_good


def test_a_lie_is_refused_or_harmless(tmp_path: Path) -> None:
    outcomes = all_outcomes(99, seed=3, folder=tmp_path)
    assert len(outcomes) == 99
    assert [(lie.words, outcome) for lie, outcome in outcomes if not is_good(outcome)] == []
