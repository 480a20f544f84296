"""The callback: its settings, and a loop of one's own as a worker."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import DiLoCoCallback, JsonLogger
from dalsegno.cli import main
from dalsegno.diloco import DiLoCoServer, WorkerOptions, nesterov
from dalsegno.errors import ConfigurationError
from dalsegno.logs import read_records
from diloco.scenes import Line, batch, local_step, plain_rounds, rules, same


def test_a_loop_of_ones_own_with_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ds.Run``, with all settings from the environment, stopped in the midst of a round and resumed; its rounds are
    records that ``dalsegno logs`` shows. Without an address, the same program trains alone."""
    data = torch.stack([batch(0, step) for step in range(12)])

    def train(folder: str, stop: int) -> Line:
        model = Line(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        callback = DiLoCoCallback()
        assert callback.active == bool(os.environ["DILOCO_SERVER"])
        args = ds.TrainingArguments(tmp_path / folder, max_steps=stop, save_steps=100)
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        with ds.Run(args, **parts, callbacks=[JsonLogger(), callback]) as run:
            for x in run.batches():
                loss = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step_end(loss=loss)
        return model

    with DiLoCoServer(tmp_path / "outer", 1, rules=rules(1)) as server:
        for name, value in {"SYNC_EVERY": 4, "BF16_COMM": 0, "SERVER": server.address, "TOKEN": server.token}.items():
            monkeypatch.setenv(f"DILOCO_{name}", str(value))
        train("worker", 6)
        together = train("worker", 12)
    assert same(together, plain_rounds(1, 3, 4, nesterov()))
    capsys.readouterr()
    assert main(["logs", "show", str(tmp_path / "worker"), "--kind", "sync", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rounds = [(each["round"], each["version"], each["global_step"]) for each in shown]
    assert rounds == [(1, 1, 4), (2, 2, 8), (3, 3, 12)]
    assert all(
        each.keys() >= {"staleness", "bytes", "outer_loss", "sync_runtime", "local_steps", "samples"} for each in shown
    )
    monkeypatch.setenv("DILOCO_SERVER", "")
    alone, by_hand = train("alone", 12), Line(seed=0)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    for step in range(12):
        local_step(by_hand, optimizer, 0, step)
    assert same(alone, by_hand)
    assert "sync" not in {each.get("kind") for each in read_records(tmp_path / "alone/logs/train.jsonl")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"num_fragments": 3, "sync_every": 2}, "num_fragments=3 with sync_every=2"),
        ({"worker_id": "../etc"}, "worker_id"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"bf16_comm": 1}, "bf16_comm=1"),
    ],
)
def test_wrong_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WorkerOptions("host:1", **given)


def test_options_of_the_environment(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """Every option has a variable. What a program gives comes first, and an empty variable counts as none."""
    (tmp_path / "token").write_text("0123456789abcdef\n")
    environment = {
        "DILOCO_SERVER": "host:1",
        "DILOCO_SYNC_EVERY": "70",
        "DILOCO_WORKER_ID": "w7",
        "DILOCO_BF16_COMM": "false",
        "DILOCO_DYLU": "yes",
        "DILOCO_HEARTBEAT_INTERVAL": "2.5",
        "DILOCO_NUM_FRAGMENTS": "3",
        "DILOCO_TIMEOUT": "60",
        "DILOCO_MAX_SYNC_RETRIES": "5",
        "DILOCO_TOKEN_FILE": str(tmp_path / "token"),
        "DILOCO_CERTIFICATE": str(certificate[0]),
        "DILOCO_INT8_COMM": "1",
        "DILOCO_OVERLAP_STEPS": "2",
        "DILOCO_MIXING_FACTOR": "0.25",
    }
    options = WorkerOptions().with_environment(environment)
    assert dataclasses.astuple(options) == (
        *("host:1", 70, "w7", False, True, 2.5, 3, 60.0, 5),
        *("0123456789abcdef", certificate[0].read_text(), True, 2, 0.25),
    )
    assert all(getattr(options, each.name) != each.default for each in dataclasses.fields(options))
    assert WorkerOptions("other:2", 9).with_environment(environment).sync_every == 9
    assert WorkerOptions().with_environment(dict.fromkeys(environment, "")) == WorkerOptions()
    with pytest.raises(ConfigurationError, match="DILOCO_SYNC_EVERY='often'"):
        WorkerOptions().with_environment({"DILOCO_SYNC_EVERY": "often"})
    with pytest.raises(ConfigurationError, match="DILOCO_TOKEN_FILE='/nowhere': No such file"):
        WorkerOptions().with_environment({"DILOCO_TOKEN_FILE": "/nowhere"})
    assert WorkerOptions().with_environment({"DILOCO_TOKEN": "first", "DILOCO_TOKEN_FILE": "/nowhere"}).token == "first"
