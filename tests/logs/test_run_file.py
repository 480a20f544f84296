"""run.json: every process life of a run, also of those that could not say goodbye."""

import json
import logging
import math
import os
import threading
from pathlib import Path

import pytest

from dalsegno.errors import StateMismatch
from dalsegno.logs import PreviousLeg, RunFile
from dalsegno.policies.recovery import Rollback
from dalsegno.system import filesystem
from dalsegno.training.rollback import RollbackFile


def test_legs_of_a_run_that_died_once(tmp_path: Path) -> None:
    run = RunFile(tmp_path)
    assert run.load() is None
    first = run.begin(None, world_size=2, first_step=0)
    run.progress(500)
    RunFile(tmp_path).begin("checkpoints/step-00000500", world_size=1, first_step=500)
    run.end("stopped", "DivergenceDetector", 731, {"loss": math.nan}, "loss diverged")

    loaded = RunFile(tmp_path).load()
    assert loaded is not None
    assert loaded.run_id == first.run_id
    died, ended = loaded.legs
    assert (died.leg, died.reason, died.ended, died.first_step, died.last_step) == (1, "died", None, 0, 500)
    assert (ended.leg, ended.reason, ended.by, ended.last_step) == (2, "stopped", "DivergenceDetector", 731)
    assert (ended.from_checkpoint, ended.world_size, ended.pid) == ("checkpoints/step-00000500", 1, os.getpid())
    assert (died.why, ended.why) == (None, "loss diverged")
    assert math.isnan(ended.metrics["loss"])
    assert ended.ended is not None
    assert ended.ended >= ended.started >= loaded.created
    json.loads(run.path.read_bytes(), parse_constant=pytest.fail)


def test_a_reason_that_reads_as_a_number(tmp_path: Path) -> None:
    run = RunFile(tmp_path)
    run.begin(None, world_size=1, first_step=0)
    run.end("stopped", "NaN", 1, {"loss": math.nan}, "NaN")
    loaded = RunFile(tmp_path).load()
    assert loaded is not None
    assert (loaded.legs[0].by, loaded.legs[0].why) == ("NaN", "NaN")
    assert math.isnan(loaded.legs[0].metrics["loss"])


def test_a_rollback_with_a_reason_that_reads_as_a_number(tmp_path: Path) -> None:
    recovery = Rollback(
        number=1,
        timestamp=1.0,
        at_step=3,
        to_step=1,
        reason="NaN",
        by="NaN",
        until=None,
        lr_factor=math.inf,
        lr_steps=None,
    )
    RollbackFile(tmp_path).decide(recovery)
    assert RollbackFile(tmp_path).read() == [recovery]


def test_it_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFile(tmp_path)
    run.begin(None, world_size=1, first_step=0)
    seen = []

    def watch(operation: str, path: Path) -> None:
        loaded = RunFile(tmp_path).load()
        assert loaded is not None
        seen.append(loaded.legs[-1].last_step)

    monkeypatch.setattr(filesystem, "watcher", watch)
    run.progress(10)
    assert set(seen) == {0, 10}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "run_id": 1, "x": 2}', b"\xff"]
)
def test_a_damaged_file_is_moved_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFile(tmp_path)
    run.path.write_bytes(content)
    why = "it is not a JSON object" if content == b"[]" else ""
    with pytest.raises(StateMismatch, match=rf"damaged.*{why}"):
        run.load()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        assert len(run.begin(None, world_size=1, first_step=0).legs) == 1
    assert "run.json.0001" in caplog.text
    assert (tmp_path / "run.json.0001").read_bytes() == content


def test_a_newer_format_stays_where_it_is(tmp_path: Path) -> None:
    run = RunFile(tmp_path)
    run.path.write_text('{"format": 2, "something": "new"}')
    with pytest.raises(StateMismatch, match="format 2 is newer than 1"):
        run.begin(None, world_size=1, first_step=0)
    assert list(tmp_path.iterdir()) == [run.path]


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_rollback_of_a_leg_that_no_file_lists_is_not_recorded(tmp_path: Path, content: bytes | None) -> None:
    run = RunFile(tmp_path)
    if content is not None:
        run.path.write_bytes(content)
    run.roll_back({"timestamp": 0.0, "from_step": 10, "to_step": 4, "by": "me", "reason": "the loss is bad"})
    assert (run.path.read_bytes() if run.path.exists() else None) == content


def test_no_leg_has_begun(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match="no leg has started"):
        RunFile(tmp_path).progress(1)


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


@pytest.mark.parametrize("change", ["end", "roll_back"])
def test_a_save_that_is_published_meanwhile_loses_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its thread has read the file, and writes it once the other change is made or waits for it."""
    run, changed = RunFile(tmp_path), threading.Event()
    run.begin(None, world_size=1, first_step=0)
    other = threading.Thread(
        target=lambda: (
            run.end("finished", None, 3, {})
            if change == "end"
            else run.roll_back({"timestamp": 1.0, "from_step": 3, "to_step": 1, "by": "it", "reason": "spike"}),
            changed.set(),
        )
    )
    replace, names = filesystem.replace_durably, []

    def interrupted(path: Path, data: bytes) -> None:
        names.append(path.name)
        if len(names) == 1:
            other.start()
            changed.wait(0.2)
        replace(path, data)

    monkeypatch.setattr(filesystem, "replace_durably", interrupted)
    run.progress(2)
    other.join()
    (leg,) = run.legs()
    assert names == ["run.json"] * 2 and (leg.reason, leg.last_step) == (
        ("finished", 3) if change == "end" else (None, 1)
    )
