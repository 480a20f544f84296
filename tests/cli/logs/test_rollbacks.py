"""How the commands show a run that went back to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.cli import main
from support.rolling import Sniffer, rolling, samples_of_step


def test_a_rollback_is_shown_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rolling(tmp_path, JsonLogger(), Sniffer(samples_of_step(10))).train()

    def printed(command: str) -> str:
        main(["logs", *command.split(), str(tmp_path)])
        return capsys.readouterr().out

    assert "step 10: back to step 4, by Sniffer: a bad sample" in printed("lineage")
    (run,) = json.loads(printed("lineage --json"))
    (rollback,) = run["legs"][0]["rollbacks"]
    assert (rollback["from_step"], rollback["to_step"]) == (10, 4)
    assert "finished, 1 rollback, 6 steps repeated" in printed("summary")
    assert "1 rollback" in printed("summary --format one-line")
    (log,) = ds.open_log(tmp_path)
    (restart,) = log.restarts()
    assert (restart.step, restart.reached, restart.leg, restart.reason) == (4, 10, None, "a bad sample")


def test_an_old_log_is_asked_where_it_would_have_gone_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"global_step": step, "loss": 1.0 if step < 700 else 9.0}) for step in range(10, 1000, 10)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["logs", "detect", str(tmp_path), "--threshold", "2", "--save-steps", "200", "--json"]) == 1
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["fires_at"], run["back_to"]) == (720, 600)
    assert main(["logs", "detect", str(tmp_path), "--threshold", "2", "--save-steps", "200", "--margin", "150"]) == 1
    assert " 400 " in capsys.readouterr().out
    assert main(["logs", "detect", str(tmp_path), "--threshold", "20", "--margin", "-1"]) == 2  # it does not fire
    assert "RecoveryPolicy(margin=-1): needs an integer" in capsys.readouterr().err
