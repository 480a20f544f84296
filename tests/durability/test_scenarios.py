"""A part of the scenarios: what becomes of each, interrupted and resumed, as in docs/reference/resume-proof.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.testing import Verdict
from durability.scenarios import SCENARIOS
from durability.scenarios.scenario import CHANGED, HEALTHY, LATE, outcomes, shown

SHOWN = shown()
STEADY = [name for name in SCENARIOS if name != "workers out of order"]
"""Which worker is the first there is a matter of how busy the machine is."""
KILLED = STEADY[::4]
STOPPED = [name for name in STEADY if SHOWN.get(name, {}).get("stopped") not in ("exact", None)][::12]


@pytest.mark.parametrize("name", KILLED)
def test_killed(tmp_path: Path, name: str) -> None:
    assert becomes(tmp_path, name, "killed") == SHOWN[name]["killed"]


@pytest.mark.parametrize("name", STOPPED)
def test_stopped(tmp_path: Path, name: str) -> None:
    assert becomes(tmp_path, name, "stopped") == SHOWN[name]["stopped"]


def becomes(folder: Path, name: str, way: str) -> Verdict:
    trial = outcomes(name, folder, [way])[way]
    print(trial)
    return trial.verdict


def test_a_killed_run_is_never_silently_different() -> None:
    """But for a variable of a loop that shows only later than in the steps that are repeated."""
    assert [*SHOWN] == [*SCENARIOS], "run: python -m durability.scenarios --write"
    for name, one in SCENARIOS.items():
        killed = SHOWN[name]["killed"]
        if one.group == LATE:
            assert killed == (Verdict.DIFFERENT if name == "losses in a list of the loop" else Verdict.SAID), name
        elif one.group == HEALTHY:
            assert {*SHOWN[name].values()} == {Verdict.EXACT}, name
        else:
            assert killed in (Verdict.EXACT, Verdict.REFUSED, Verdict.SAID), name
        assert killed == Verdict.DIFFERENT or Verdict.DIFFERENT not in SHOWN[name].values(), name
        assert one.group != CHANGED or killed != Verdict.EXACT, name
