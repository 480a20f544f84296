"""A disk that is full when a leg begins, rolls back or ends: what is safe is safe, and the message says so."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.errors import SaveFailed
from dalsegno.logs import RunFile, read_records
from dalsegno.system import filesystem
from dalsegno.testing import compare_runs
from dalsegno.training.rollback import RECOVERIES
from support.listeners import Listener
from support.rolling import Sniffer, rolling, samples_of_step
from support.small import small_trainer


class Disk:
    """Has no room for ``run.json``, or another file, from when it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.refused = "run.json"

    def watch(self, operation: str, path: Path) -> None:
        if self.is_full and operation == "write" and self.refused in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def fill(self, ctx: object) -> None:
        self.is_full = True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(filesystem, "watcher", disk.watch)
    return disk


def trainer(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(output_dir, JsonLogger(), *callbacks, max_steps=6, save_steps=3, logging_steps=2)


def test_at_the_end_of_a_run(tmp_path: Path, disk: Disk) -> None:
    trainer(tmp_path / "whole").train()
    with pytest.raises(SaveFailed) as caught:
        trainer(tmp_path / "run", Listener({"on_train_end": disk.fill}, name="filler")).train()
    for part in ("run.json could not be written", "No space left", "finished at step 6", "step-00000006", "make room"):
        assert part in str(caught.value)
    disk.is_full = False
    result = trainer(tmp_path / "run", Listener({}, name="filler")).train()
    assert (result.global_step, result.reason) == (6, "finished")
    record = RunFile(tmp_path / "run").load()
    assert record is not None and [leg.reason for leg in record.legs] == ["died", "finished"]
    steps = [
        [each.get("global_step") for each in read_records(tmp_path / name / "logs/train.jsonl")]
        for name in ("whole", "run")
    ]
    assert steps[0] == steps[1]
    assert compare_runs(tmp_path / "whole", tmp_path / "run").identical


def test_at_its_beginning(tmp_path: Path, disk: Disk) -> None:
    disk.is_full = True
    with pytest.raises(SaveFailed, match=r"run\.json could not be written: .*No space left.* nothing is trained"):
        trainer(tmp_path).train()
    disk.is_full = False
    assert trainer(tmp_path).train().reason == "finished"


def test_when_a_run_has_gone_back_the_file_that_is_named_is_the_one_that_was_refused(
    tmp_path: Path, disk: Disk
) -> None:
    filling = Listener(
        {"on_step_end": lambda ctx: disk.fill(ctx) if ctx.state.global_step == 9 else None}, name="fills"
    )
    with pytest.raises(SaveFailed, match=r"^[^ ]*/run\.json could not be written: .* resumes from its newest"):
        rolling(tmp_path, Sniffer(samples_of_step(10)), filling).train()
    disk.is_full = False
    sniffer = Sniffer(samples_of_step(10))
    assert rolling(tmp_path, sniffer, Listener({}, name="fills")).train().reason == "finished"


def test_when_a_run_goes_back(tmp_path: Path, disk: Disk) -> None:
    disk.is_full, disk.refused = True, RECOVERIES
    with pytest.raises(
        SaveFailed, match=rf"{RECOVERIES} could not be written: .*No space left.* resumes from its newest"
    ):
        rolling(tmp_path, Sniffer(samples_of_step(10))).train()
    disk.is_full = False
    sniffer = Sniffer(samples_of_step(10))
    assert rolling(tmp_path, sniffer).train().reason == "finished"
    assert sniffer.rollbacks == [(10, 4)]
