"""What a launcher found out about the end of a leg is recorded with that leg, and with no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.logs import PreviousLeg, RunFile

HERE = PreviousLeg(os.uname().nodename, os.getpid(), "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("reason", "previous", "cause"),
    [
        (None, HERE, HERE.cause),
        ("exception", HERE, HERE.cause),
        ("finished", HERE, None),
        (None, PreviousLeg(HERE.host, HERE.pid + 1, "another's"), None),
        (None, None, None),
    ],
)
def test_the_cause_of_a_legs_end(
    reason: str | None, previous: PreviousLeg | None, cause: str | None, tmp_path: Path
) -> None:
    file = RunFile(tmp_path)
    file.begin(None, 2, 0)
    if reason is not None:
        file.end(reason, None, 3, {})
    run = file.begin(None, 2, 0, previous)
    assert [leg.cause for leg in run.legs] == [cause, None]
    assert RunFile(tmp_path).load() == run


def test_it_is_passed_in_the_environment() -> None:
    assert PreviousLeg.from_environment(HERE.to_environment()) == HERE
    for content in ({}, {"DALSEGNO_PREVIOUS_LEG": "{"}, {"DALSEGNO_PREVIOUS_LEG": "[]"}):
        assert PreviousLeg.from_environment(content) is None
