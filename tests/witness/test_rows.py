"""The rows of a witness on disk: bounded, removed with old checkpoints, and dispensable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.state import ResumeProof
from dalsegno.testing import compare_runs
from dalsegno.witness import WITNESS
from dalsegno.witness import witness as module
from support.crash import Crash
from support.disks import small_disk
from support.small import small_trainer


def trainer(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    usual: dict[str, Any] = {"max_steps": 10, "save_steps": 4, "save_in_background": False}
    return small_trainer(output_dir, JsonLogger(), *callbacks, **usual | settings)


def crash(output_dir: Path, after: int, **settings: Any) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer(output_dir, Crash(after), **settings).train()


def resume(output_dir: Path, **settings: Any) -> ResumeProof:
    last = trainer(output_dir, **settings)
    last.train()
    assert last.state.resume_proof is not None
    return last.state.resume_proof


def files(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / WITNESS).iterdir())


def steps(output_dir: Path, name: str) -> list[int]:
    rows = map(json.loads, filter(None, (output_dir / WITNESS / name).read_text().splitlines()))
    return [row["global_step"] for row in rows if "global_step" in row]


def test_files_of_old_checkpoints_are_removed(tmp_path: Path) -> None:
    crash(tmp_path, after=19, max_steps=20)
    assert files(tmp_path) == ["step-00000012.rank-00000.jsonl", "step-00000016.rank-00000.jsonl"]
    assert steps(tmp_path, "step-00000016.rank-00000.jsonl") == [17, 18, 19]


def test_rows_stay_bounded_over_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However cheap recording is: after each so many rows, only every second one of those that follow is written."""
    monkeypatch.setattr(module, "SHARE", 1e9)
    monkeypatch.setattr(module, "ROWS", 8)
    crash(tmp_path, after=200, max_steps=1000, save_steps=0)
    recorded = steps(tmp_path, "step-00000000.rank-00000.jsonl")
    assert recorded[:10] == [*range(1, 9), 10, 12]
    assert len(recorded) < 60 and recorded[-1] > 160


def test_steps_that_cost_too_much_are_recorded_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three after a checkpoint are recorded in any case; a leg compares those that were."""
    monkeypatch.setattr(module, "SHARE", 1e-12)
    crash(tmp_path, after=10, max_steps=12)
    assert steps(tmp_path, "step-00000004.rank-00000.jsonl") == [5, 6, 7]
    assert steps(tmp_path, "step-00000008.rank-00000.jsonl") == [9, 10]
    crash(tmp_path / "longer", after=11, save_steps=5, max_steps=14)
    assert steps(tmp_path / "longer", "step-00000005.rank-00000.jsonl") == [6, 7, 8]
    proof = resume(tmp_path / "longer", save_steps=5, max_steps=14)
    assert (proof.verdict, proof.first_step, proof.last_step) == ("exact", 11, 11)


def test_a_torn_last_line(tmp_path: Path) -> None:
    crash(tmp_path, after=7)
    (name,) = (each for each in files(tmp_path) if each.startswith("step-00000004"))
    path = tmp_path / WITNESS / name
    path.write_bytes(path.read_bytes()[:-20])
    proof = resume(tmp_path)
    assert (proof.verdict, proof.last_step) == ("exact", 6)


def test_rows_behind_a_torn_line_are_read(tmp_path: Path) -> None:
    """A leg that was killed while it wrote a row, and one that wrote on in the same file."""
    crash(tmp_path, after=6)
    path = tmp_path / WITNESS / "step-00000004.rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    crash(tmp_path, after=7)
    *_, settings, sixth, seventh = filter(None, path.read_text().splitlines())
    assert "settings" in json.loads(settings), "its line begins behind the torn one"
    assert [json.loads(row)["global_step"] for row in (sixth, seventh)] == [6, 7]
    proof = resume(tmp_path)
    assert (proof.verdict, proof.last_step) == ("exact", 7)


def test_steps_that_are_repeated_are_not_recorded_twice(tmp_path: Path) -> None:
    crash(tmp_path, after=7)
    crash(tmp_path, after=7)
    assert steps(tmp_path, "step-00000004.rank-00000.jsonl") == [5, 6, 7]


def test_without_its_files_nothing_is_proven(tmp_path: Path) -> None:
    crash(tmp_path, after=7)
    for name in files(tmp_path):
        (tmp_path / WITNESS / name).unlink()
    assert resume(tmp_path).verdict == "not proven"


def test_a_full_disk_does_not_end_training(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").train()
    run = tmp_path / "run"
    run.mkdir()
    with small_disk(run / WITNESS, kilobytes=4) as disk:
        subprocess.run(["sh", "-c", f"cat /dev/zero > {disk}/filler"], capture_output=True, check=False)
        crash(run, after=7)
        assert resume(run).verdict == "not proven"
    assert compare_runs(tmp_path / "whole", run).identical


def test_training_starts_over_without_the_rows_of_before(tmp_path: Path) -> None:
    crash(tmp_path, after=3)
    crash(tmp_path, after=7)
    recorded = steps(tmp_path, "step-00000000.rank-00000.jsonl")
    assert recorded[:3] == [1, 2, 3] and recorded == sorted({*recorded})
    again = trainer(tmp_path, Crash(2))
    with pytest.raises(RuntimeError):
        again.train(False)
    assert [steps(tmp_path, name) for name in files(tmp_path)] == [[1, 2]]
