"""The text of ``--kill-at`` becomes a fault plan."""

from __future__ import annotations

import pytest

from dalsegno.cli.check_resume import fault_plan
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        ("on_step_end:12", FaultPlan(event=Event.STEP_END, count=12)),
        ("write:3", FaultPlan(operation="write", count=3)),
        ("fsync:1:logs/train.jsonl", FaultPlan(operation="fsync", count=1, path="logs/train.jsonl")),
        ("any:2:a:b", FaultPlan(operation="any", count=2, path="a:b")),
        ("2.5s", FaultPlan(seconds=2.5)),
    ],
)
def test_a_moment(spec: str, plan: FaultPlan) -> None:
    assert fault_plan(spec) == plan


@pytest.mark.parametrize("spec", ["", "write", "write:", "write:many", "s", "soons", "on_step_end", "on_step_end:0"])
def test_no_moment(spec: str) -> None:
    with pytest.raises(ConfigurationError):
        fault_plan(spec)


@pytest.mark.parametrize(("spec", "nearest"), [("on_stepend:3", "on_step_end"), ("wirte:3", "write")])
def test_the_nearest_is_named(spec: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{nearest}'"):
        fault_plan(spec)


def test_an_event_has_no_path() -> None:
    with pytest.raises(ConfigurationError, match="on_step_end:3:logs"):
        fault_plan("on_step_end:3:logs")
