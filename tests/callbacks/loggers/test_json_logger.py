"""JsonLogger: one record for each on_log, one header for each run, cut back on resume."""

import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from callbacks.stage import Stage
from dalsegno.callbacks import JsonLogger
from dalsegno.errors import CannotSave, ConfigurationError
from dalsegno.logs import read_records


def records(path: Path) -> list[dict[str, Any]]:
    found = list(read_records(path))
    for record in found:
        assert abs(record.pop("timestamp") - time.time()) < 60
    return found


def test_a_record_for_each_kind_behind_one_header(tmp_path: Path) -> None:
    stage = Stage(tmp_path, JsonLogger(run="baseline", lr=3e-4))
    stage.state.epoch = 0.5
    stage.begin()
    stage.log(10, loss=2.0)
    stage.log(10, "eval", eval_loss=math.nan)
    stage.log(20, "final", train_runtime=1.0)
    stage.end()
    found = records(tmp_path / "logs/train.jsonl")
    assert math.isnan(found[2].pop("eval_loss"))
    assert found == [
        {"kind": "header", "run": "baseline", "lr": 3e-4},
        {"global_step": 10, "epoch": 0.5, "loss": 2.0},
        {"global_step": 10, "epoch": 0.5, "kind": "eval"},
        {"global_step": 20, "epoch": 0.5, "kind": "final", "train_runtime": 1.0},
    ]


@pytest.mark.parametrize("path", ["logs/train.jsonl", "mine.json"])
def test_a_resumed_run_has_the_records_of_one_never_killed(tmp_path: Path, path: str) -> None:
    killed = Stage(tmp_path, callback := JsonLogger(path=path))
    killed.begin()
    for step in range(1, 4):
        killed.log(step, loss=step)
    state = callback.state_dict()
    for step in range(4, 9):
        killed.log(step, loss=-step)
    del killed, callback
    gc.collect()  # no on_train_end: it was killed

    resumed = Stage(tmp_path, callback := JsonLogger(path=path))
    callback.load_state_dict(state)
    resumed.begin()
    for step in range(4, 7):
        resumed.log(step, loss=step)
    resumed.end()
    found = records(tmp_path / path)
    assert [record.get("loss") for record in found] == [None, 1, 2, 3, 4, 5, 6]
    [archive] = (tmp_path / path).parent.glob("rewound/*")
    assert [record["loss"] for record in records(archive)] == [-4, -5, -6, -7, -8]


def test_a_second_train_goes_on_and_a_rollback_goes_back_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, callback := JsonLogger())
    stage.begin()
    stage.log(1, loss=1)
    stage.log(1, "final", train_runtime=1.0)
    stage.end()
    stage.begin()
    stage.log(2, loss=2)
    state = callback.state_dict()
    stage.log(3, loss=3)
    callback.load_state_dict(state)
    stage.log(3, loss=30)
    stage.end()
    stage.begin()
    stage.log(4, loss=4)
    stage.end()
    assert [record.get("loss") for record in records(tmp_path / "logs/train.jsonl")] == [None, 1, 2, 30, 4]
    assert [record["kind"] for record in records(tmp_path / "logs/rewound/train.jsonl.0001")] == ["final"]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    killed = Stage(tmp_path, JsonLogger())
    killed.begin()
    killed.log(1, loss=1)
    del killed
    gc.collect()
    again = Stage(tmp_path, JsonLogger())
    again.begin()
    again.log(1, loss=1)
    assert len(records(tmp_path / "logs/train.jsonl")) == 2
    assert len(records(tmp_path / "logs/rewound/train.jsonl.0001")) == 2


def test_two_need_two_paths_and_the_second_touches_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, JsonLogger(), JsonLogger(name="other"))
    with pytest.raises(ConfigurationError, match="another logger writes this file; give one of them another path="):
        stage.begin()
    stage.end()
    assert not (tmp_path / "logs/rewound").exists()

    two = Stage(tmp_path, JsonLogger(), JsonLogger(name="other", path="logs/other.json"))
    two.begin()
    two.log(1, loss=1)
    two.end()
    assert len(json.loads((tmp_path / "logs/other.json").read_bytes())) == 2


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    other = Stage(tmp_path, callback := JsonLogger(), rank=1)
    other.begin()
    other.log(1, loss=1)
    other.end()
    assert callback.state_dict() is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_logged_outside_of_training_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, JsonLogger(name="mine"))
    stage.log(0, loss=1)
    stage.log(0, loss=1)
    assert len(caplog.messages) == 1
    assert "mine writes while training runs" in caplog.text


def test_what_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="global_step= is part of every record"):
        JsonLogger(global_step=3)
    with pytest.raises(ConfigurationError, match=r"must be \.jsonl"):
        Stage(tmp_path, JsonLogger(path="a.csv")).begin()
    stage = Stage(tmp_path, JsonLogger())
    stage.begin()
    with pytest.raises(CannotSave, match="record key 'model'") as caught:
        stage.log(1, model=stage)
    assert caught.value.__notes__ == ["raised in JsonLogger.on_log"]
