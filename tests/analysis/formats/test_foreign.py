"""Logs of other programs, as these programs write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dalsegno as ds
from analysis.formats.foreign import train_with_lightning, train_with_transformers


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    train_with_transformers(folder)
    return folder


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    train_with_lightning(folder)
    return folder


def test_hugging_faces_state_is_that_of_the_last_checkpoint(hf: Path) -> None:
    log = ds.open_log(hf)
    assert log.source.path == hf / "checkpoint-12" / "trainer_state.json"
    assert log.name == hf.name
    assert log.header["max_steps"] == 12
    assert log.summary().state == "finished"
    assert ds.open_log(hf / "checkpoint-8").summary().state == "unknown"
    assert [(record["kind"], record["global_step"]) for record in log.records()] == [
        *(("train", step) for step in (2, 4, 6)),
        ("eval", 6),
        *(("train", step) for step in (8, 10, 12)),
        ("eval", 12),
    ]
    history = json.loads(log.source.path.read_text())["log_history"]
    assert log.metric("loss").values.tolist() == [record["loss"] for record in history if "loss" in record]
    assert log.metrics()[:3] == ["grad_norm", "learning_rate", "loss"]
    assert "max_steps" not in log.metrics()
    epochs = log.metric("eval_loss").epochs
    assert epochs is not None
    assert epochs.tolist() == [1.5, 3.0]


def test_hugging_faces_state_broken_off(hf: Path, tmp_path: Path) -> None:
    whole = (hf / "checkpoint-12" / "trainer_state.json").read_text()
    end = whole.index('"loss"', whole.index('"step": 8'))
    (tmp_path / "trainer_state.json").write_text(whole[:end])
    log = ds.open_log(tmp_path)
    assert log.metric("loss").steps.tolist() == [2, 4, 6, 8]
    assert "the rest is not read" in str(log.skipped)


def test_what_hugging_face_has_told_tensorboard(hf: Path) -> None:
    (log,) = ds.open_log(hf / "runs")
    state = ds.open_log(hf)
    assert [(record["kind"], record["global_step"]) for record in log.records()] == [
        *((record["kind"], record["global_step"]) for record in state.records()),
        ("final", 12),
    ]
    for name in ("loss", "grad_norm", "eval_loss"):
        mine, other = log.metric(name), state.metric(name)
        assert mine.steps.tolist() == other.steps.tolist()
        np.testing.assert_array_equal(mine.values, other.values.astype(np.float32))
        assert mine.times is not None
        assert np.all(np.diff(mine.times) > 0)


def test_lightnings_metrics(lightning: Path) -> None:
    (log,) = ds.open_log(lightning)
    assert log.name == "lightning_logs/version_0"
    assert log.loss == "train_loss"
    assert log.metric("train_loss").steps.tolist() == [1, 3, 5, 7, 9, 11]
    assert log.metric("val_loss", "eval").steps.tolist() == [3, 7, 11]
    assert log.frame()["train_loss"].null_count() == 3


def test_lightnings_metrics_cut_at_every_byte(lightning: Path, tmp_path: Path) -> None:
    """A number that is cut in two would be another number."""
    whole = (lightning / "lightning_logs" / "version_0" / "metrics.csv").read_bytes()
    numbers = ds.open_log(lightning / "lightning_logs" / "version_0").metric("train_loss").values.tolist()
    for length in range(len(whole)):
        (tmp_path / "metrics.csv").write_bytes(whole[:length])
        log = ds.open_log(tmp_path)
        rows = whole[:length].count(b"\n") - 1
        assert len(list(log.records())) == max(0, rows)
        assert log.skipped.count == (not whole[:length].endswith(b"\n") and length > 0)
        if "train_loss" in log.metrics():
            assert log.metric("train_loss").values.tolist() == numbers[: len(log.metric("train_loss"))]


def test_tensorboard_after_a_restart(tmp_path: Path) -> None:
    """The second file says from which step on the first one does not count."""
    from torch.utils.tensorboard import SummaryWriter

    for begin, end, purge in ((1, 9, None), (5, 12, 5)):
        with SummaryWriter(str(tmp_path), purge_step=purge, filename_suffix=f".{begin}") as writer:
            for step in range(begin, end):
                writer.add_scalar("loss", begin + step / 16, step)
                writer.add_scalar("text/ignored", step, step)
                writer.add_text("note", "not a number", step)
    for begin, count in ((1, 9), (5, 10)):  # both legs of one process, in one second
        (path,) = tmp_path.glob(f"*.{begin}")
        path.rename(tmp_path / f"events.out.tfevents.1790000000.host.4711.{count}.{begin}")
    log = ds.open_log(tmp_path)
    assert log.metric("loss").steps.tolist() == list(range(1, 12))
    assert log.metric("loss").values.tolist() == [
        *(1 + step / 16 for step in range(1, 5)),
        *(5 + step / 16 for step in range(5, 12)),
    ]
    assert log.skipped.count == 4
    assert "4 records from step 5 on, replaced by a restart" in str(log.skipped)
    assert log.metrics() == ["loss", "text/ignored"]


def test_tensorboard_cut_at_every_byte(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "whole")) as writer:
        for step in range(1, 4):
            writer.add_scalar("loss", step, step)
    (path,) = (tmp_path / "whole").iterdir()
    whole = path.read_bytes()
    cut = tmp_path / path.name
    last = 0
    for length in range(len(whole) + 1):
        cut.write_bytes(whole[:length])
        log = ds.open_log(cut)
        steps = [record["global_step"] for record in log.records()]
        assert steps == [1, 2, 3][: len(steps)]
        assert len(steps) >= last
        assert len(steps) < 3 or not log.skipped
        last = len(steps)
    assert last == 3
