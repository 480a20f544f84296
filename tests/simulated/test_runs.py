"""Runs on the simulated accelerator, killed and resumed: as if they had never been killed, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, check_resume

from . import jobs
from .accelerator import build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the simulated accelerator needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build()


PLANS = [
    FaultPlan(event=Event.OPTIMIZER_STEP, count=4),
    FaultPlan(operation="any", path=".partial", count=25),
    FaultPlan(event=Event.STEP_BEGIN, count=3),
]


@pytest.mark.parametrize(
    "job", [jobs.background, jobs.foreground, jobs.in_memory, jobs.own_loop, jobs.own_loop_elsewhere]
)
def test_killed_and_resumed(tmp_path: Path, job: Any) -> None:
    comparison = check_resume(job, PLANS, folder=tmp_path)
    assert comparison.identical, comparison.table()


@pytest.mark.parametrize("job", [jobs.ddp, jobs.fsdp])
def test_two_ranks_with_a_device_each(tmp_path: Path, job: Any) -> None:
    comparison = check_resume(job, [FaultPlan(event=Event.STEP_BEGIN, count=6)], folder=tmp_path, world_size=2)
    assert comparison.identical, comparison.table()
