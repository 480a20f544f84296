"""compare_runs: the states of two runs, tensor by tensor."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import DiLoCoCallback, TBLogger, WandbLogger
from dalsegno.diloco import DiLoCoServer
from dalsegno.testing import compare_runs
from support.small import small_trainer


class Keeper(ds.Callback):
    """Its state is a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def difference_of(tensor: torch.Tensor, other: torch.Tensor, folder: Path) -> str | None:
    """The difference between the states of two runs, one with each of the tensors; None if they are identical."""
    paths = [folder / "one", folder / "other"]
    for path, each in zip(paths, (tensor, other), strict=True):
        small_trainer(path, Keeper(each), max_steps=2, save_steps=2).train()
    rows = compare_runs(*paths).rows
    return next((row.difference for row in rows if row.difference), None)


class Registered(ds.Callback):
    """Its id, and its place in a file of ids, are those of this run."""

    state_varies = ("id", "file.length")

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"id": uuid.uuid4().hex, "file": {"length": uuid.uuid4().int % 1000, "records": 0}}

    def on_step_end(self, ctx: Any) -> None:
        self.state["file"]["records"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_without_elements_are_equal(tmp_path: Path) -> None:
    assert difference_of(torch.zeros(2, 0), torch.zeros(2, 0), tmp_path) is None


def test_what_a_callback_declares_as_varying_is_not_compared(tmp_path: Path) -> None:
    for folder, steps in (("one", 4), ("other", 4), ("longer", 5)):
        small_trainer(tmp_path / folder, Registered(), max_steps=steps, save_steps=steps).train()
    assert compare_runs(tmp_path / "one", tmp_path / "other").identical
    rows = {row.what: row.difference for row in compare_runs(tmp_path / "one", tmp_path / "longer").rows}
    assert rows["callbacks.Registered"] == "callbacks.Registered[0].file.records: 4 and 5"
    small_trainer(
        tmp_path / "one", max_steps=6, save_steps=6
    ).train()  # without the callback, whose state is carried on
    small_trainer(tmp_path / "other", max_steps=6, save_steps=6).train()
    assert compare_runs(tmp_path / "one", tmp_path / "other").identical


def test_ids_of_trackers_and_of_diloco_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for folder in ("one", "other"):
        with DiLoCoServer(tmp_path / f"{folder}-server", 1) as server:
            monkeypatch.setenv("DILOCO_TOKEN", server.token)
            callbacks = [WandbLogger("tests", mode="offline", wait_s=60), TBLogger(), DiLoCoCallback(server.address, 2)]
            small_trainer(tmp_path / folder, *callbacks, max_steps=4, save_steps=2, logging_steps=1).train()
    comparison = compare_runs(tmp_path / "one", tmp_path / "other")
    assert comparison.identical, comparison.table()
    assert "callbacks.DiLoCoCallback" in {row.what for row in comparison.rows}, "the rest of its state is compared"


def test_a_torn_line_is_a_warning_but_not_a_file_in_json_that_is_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "other"):
        small_trainer(tmp_path / name, max_steps=1, save_steps=1).train()
        (tmp_path / name / "config.json").write_text(json.dumps({"layers": 2}, indent=2))
    assert compare_runs(tmp_path / "one", tmp_path / "other").identical
    assert "skipped line" not in caplog.text
    (tmp_path / "one" / "log.jsonl").write_text('{"step": 1}\n{"st')
    assert not compare_runs(tmp_path / "one", tmp_path / "other").identical
    assert "log.jsonl: skipped line 2" in caplog.text and "config.json" not in caplog.text
