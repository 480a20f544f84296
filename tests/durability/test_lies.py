"""A small share of ``make lies``: whatever a checkpoint claims, it is refused by name, or the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

from durability.lies import SAVED, agree, all_outcomes, believe, first_leg, is_good


def test_a_lie_is_refused_or_harmless(tmp_path: Path) -> None:
    outcomes = all_outcomes(99, seed=3, folder=tmp_path)
    assert len(outcomes) == 99
    assert [(lie.words, outcome) for lie, outcome in outcomes if not is_good(outcome)] == []


def test_a_moment_that_the_optimizer_does_not_list_is_refused(tmp_path: Path) -> None:
    """Its tensor is there; without it the first step would raise a KeyError."""
    first_leg(tmp_path, "map")
    checkpoint = tmp_path / f"checkpoints/step-{SAVED:08d}"
    content = json.loads((checkpoint / "shared.json").read_bytes())
    name = content["states"]["optimizer"]["states"][0]["spread"]["exp_avg"].pop()
    (checkpoint / "shared.json").write_text(json.dumps(content))
    agree(checkpoint)
    outcome = believe(tmp_path, "map")
    assert outcome.startswith("refused: ")
    assert f"tensor that is not listed: {name}.exp_avg" in outcome
