"""Callbacks that come, go and change while a run is killed and resumed: no state is lost, all is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.errors import RankFailed
from dalsegno.testing import run_ranks, start_ranks
from support.casts import leg


def killed(world_size: int, *args: Any) -> None:
    for outcome in start_ranks(leg, world_size, *args).wait():
        assert outcome.exit_code != 0, "it has lived to its end"


def test_a_callback_that_is_gone_gets_its_state_back(tmp_path: Path) -> None:
    """Through kills, later checkpoints and another number of ranks."""
    killed(2, tmp_path, "both", 12, 5)  # the last checkpoint is that of step 4
    killed(1, tmp_path, "nobody", 12, 3)  # and now of step 6
    (found,) = run_ranks(leg, 1, tmp_path, "nobody", 8)
    assert sorted(found["report"].carried) == ["callbacks.Own", "callbacks.Steps"]
    assert (found["step"], found["end"]) == (6, 8)

    back = run_ranks(leg, 2, tmp_path, "both", 10)
    assert [rank["loaded"] for rank in back] == [{"Steps": 4, "Own": 4}, {"Steps": 4, "Own": 40}]
    assert [rank["steps"] for rank in back] == [{"Steps": 6, "Own": 6}, {"Steps": 6, "Own": 60}]
    assert [rank["report"].carried for rank in back] == [[], []]


def test_one_that_is_new_starts_fresh(tmp_path: Path) -> None:
    killed(1, tmp_path, "nobody", 12, 3)
    found = leg(tmp_path, "steps", 6)
    assert found["report"].fresh == ["callbacks.Steps"]
    assert found["steps"] == {"Steps": 4}


def test_one_that_was_renamed(tmp_path: Path) -> None:
    killed(1, tmp_path, "steps", 12, 5)
    found = leg(tmp_path, "renamed", 6)
    assert found["loaded"] == {"StepsOfToday": 4}
    assert "callbacks.StepsOfToday: found under its former key callbacks.Steps" in found["report"].notes
    again = leg(tmp_path, "renamed", 8)
    assert again["loaded"] == {"StepsOfToday": 6}
    assert (again["report"].notes, again["report"].carried) == ([], [])


def test_a_later_version_upgrades_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    killed(1, tmp_path, "steps", 12, 5)
    assert leg(tmp_path, "nobody", 6)["end"] == 6  # carried, in the version that wrote it
    found = leg(tmp_path, "second version", 8)
    assert found["loaded"] == {"Steps": 400}
    assert "callbacks.Steps: upgraded from version 1 to 2" in found["report"].notes
    with pytest.raises(ds.StateMismatch, match=r"callbacks\.Steps: the saved state has version 2, .* knows up to 1"):
        leg(tmp_path, "steps", 10)


def test_a_state_that_nothing_upgrades_leaves_all_as_it_was(tmp_path: Path) -> None:
    leg(tmp_path, "both", 2)
    manifests = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}
    with pytest.raises(ds.StateMismatch, match="give the class a method migrate"):
        leg(tmp_path, "no way", 4)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")} == manifests
    assert leg(tmp_path, "both", 4)["loaded"] == {"Steps": 2, "Own": 2}


def test_per_rank_states_follow_the_ranks_where_their_callback_says_how(tmp_path: Path) -> None:
    killed(2, tmp_path, "shared", 12, 5)
    (found,) = run_ranks(leg, 1, tmp_path, "shared", 6)
    assert found["loaded"] == {"Steps": 4, "Own": 44}
    assert "callbacks.Own: resharded from 2 to 1 states" in found["report"].notes
    back = run_ranks(leg, 2, tmp_path, "shared", 8)
    assert [rank["loaded"] for rank in back] == [{"Steps": 6, "Own": 46}, {"Steps": 6, "Own": 0}]


def test_per_rank_states_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    killed(2, tmp_path, "both", 12, 5)
    with pytest.raises(RankFailed, match=r"callbacks\.Own: its state is per rank and was saved by 2 ranks, now there"):
        run_ranks(leg, 1, tmp_path, "both", 6)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("both", "steps", "callbacks.Own: saved, but not here"),
        ("steps", "both", "callbacks.Own: here, but not saved"),
    ],
)
def test_either_is_an_error_if_one_asks_for_it(tmp_path: Path, before: str, after: str, complaint: str) -> None:
    killed(1, tmp_path, before, 12, 3)
    with pytest.raises(ds.StateMismatch) as raised:
        leg(tmp_path, after, 4, strict_callbacks=True)
    assert str(raised.value).splitlines()[1:] == [f"  {complaint}"]
    assert leg(tmp_path, before, 4, strict_callbacks=True)["step"] == 2
