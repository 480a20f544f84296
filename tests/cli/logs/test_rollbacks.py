"""How the commands show a run that went back to a checkpoint, or was killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.cli import main
from dalsegno.testing import start_ranks
from support.listeners import Listener
from support.rolling import Sniffer, rolling, samples_of_step
from support.small import small_trainer


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


def train_and_die(output_dir: Path, step: int) -> None:
    def die(ctx: Any) -> None:
        if ctx.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    killer = Listener({"on_step_done": die}, name="killer")
    settings = {"max_steps": 10, "save_steps": 4, "logging_steps": 4, "save_in_background": False}
    small_trainer(output_dir, JsonLogger(), killer, **settings).train()


def test_a_killed_leg_is_shown_with_the_steps_after_its_last_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (outcome,) = start_ranks(train_and_die, 1, tmp_path, 7).wait()
    assert outcome.was_killed
    start_ranks(train_and_die, 1, tmp_path, 11).wait()
    assert main(["logs", "lineage", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "leg 1  from scratch, steps 0 to 7: died" in printed and "steps 5 to 7 repeated, " in printed
    assert "leg 2  from checkpoints/step-00000004, steps 4 to 10: finished" in printed


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
