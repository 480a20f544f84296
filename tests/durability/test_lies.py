"""A small share of ``make lies``: whatever a checkpoint claims, it is refused by name, or the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from durability.lies import SAVED, agree, all_outcomes, believe, first_leg, is_good


def test_a_lie_is_refused_or_harmless(tmp_path: Path) -> None:
    outcomes = all_outcomes(60, seed=3, folder=tmp_path)
    assert len(outcomes) == 60
    assert [(lie.words, outcome) for lie, outcome in outcomes if not is_good(outcome)] == []


def forged(folder: Path, change: Callable[[Any], object]) -> str:
    """What loading the first leg's checkpoint comes to, once its optimizer's non-tensor state is changed."""
    first_leg(folder, "map")
    checkpoint = folder / f"checkpoints/step-{SAVED:08d}"
    content = json.loads((checkpoint / "shared.json").read_bytes())
    change(content["states"]["optimizer"]["states"][0])
    (checkpoint / "shared.json").write_text(json.dumps(content))
    agree(checkpoint)
    return believe(folder, "map")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"eps": 10**40}, "groups[0].eps: 1"),
        (
            {"betas": {"$tuple": [0.9, 3.0]}},
            "groups[0]: AdamW does not accept it: Invalid beta parameter at index 1: 3.0",
        ),
        ({"amsgrad": True}, "groups[0]: with these, AdamW needs 'max_exp_avg_sq', which is not saved"),
    ],
)
def test_a_hyperparameter_that_no_step_could_take_is_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    """The constructor of the optimizer would refuse it, too."""
    outcome = forged(tmp_path, lambda optimizer: optimizer["groups"][0].update(changed))
    assert outcome.startswith("refused: ")
    assert words in outcome


def test_a_moment_that_the_optimizer_does_not_list_is_refused(tmp_path: Path) -> None:
    """Its tensor is there; without it the first step would raise a KeyError."""
    dropped: list[str] = []
    outcome = forged(tmp_path, lambda optimizer: dropped.append(optimizer["sharded"]["exp_avg"].pop()))
    assert outcome.startswith("refused: ")
    assert f"tensor that is not listed: {dropped[0]}.exp_avg" in outcome


def test_a_count_of_the_loaders_that_is_none_is_refused(tmp_path: Path) -> None:
    """torchdata adds to it when it gives its first batch."""
    first_leg(tmp_path, "stateful")
    checkpoint = tmp_path / f"checkpoints/step-{SAVED:08d}"
    content = json.loads((checkpoint / "rank-00000.json").read_bytes())
    content["states"]["loader"]["states"][0]["loader"]["_num_yielded"] = [0]
    (checkpoint / "rank-00000.json").write_text(json.dumps(content))
    agree(checkpoint)
    outcome = believe(tmp_path, "stateful")
    assert outcome.startswith("refused")
    assert "loader._num_yielded: is a list of 1; must be a 64-bit integer or None" in outcome


def test_a_text_that_no_file_can_take_is_shown(tmp_path: Path) -> None:
    """The list of changed settings is printed, whatever the checkpoint contains."""
    first_leg(tmp_path, "map")
    checkpoint = tmp_path / f"checkpoints/step-{SAVED:08d}"
    content = json.loads((checkpoint / "shared.json").read_bytes())
    content["states"]["settings"]["states"][0]["save_total_limit"] = "\ud800"
    (checkpoint / "shared.json").write_text(json.dumps(content))
    agree(checkpoint)
    assert believe(tmp_path, "map").startswith(("refused", "harmless"))
