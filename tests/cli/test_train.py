"""``dalsegno train`` on files and modules that lie in the user's own folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import dalsegno
from dalsegno.cli import main
from dalsegno.logs import read_records

OWN_TRAINING = """
import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data


class Stop(ds.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, ctx):
        if ctx.step == self.step:
            ctx.control.stop("enough")


def build(args, callbacks, length: int = 20):
    torch.manual_seed(0)
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(length), callbacks=callbacks)
"""

RUN = """
trainer = "own_run:build"
callbacks = [{use = "JsonLogger", run = "baseline"}, {use = "InfoCallback", enabled = false}]

[args]
output_dir = "runs/a"
max_steps = 4
logging_steps = 1
use_cpu = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own, where the user is."""
    (tmp_path / "own_run.py").write_text(OWN_TRAINING)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that the path is put back
    return tmp_path


def steps(folder: Path) -> list[int]:
    records = read_records(folder / "runs" / "a" / "logs" / "train.jsonl")
    return [record["global_step"] for record in records if "kind" not in record]


def test_a_run_is_trained_gone_on_with_and_begun_anew(folder: Path) -> None:
    done = dalsegno("train", "run.toml", "--set", "args.save_steps=2", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "output     runs/a" not in done.stdout, "the InfoCallback is switched off"
    assert main(["train", "run.toml", "--set", "args.max_steps=6"]) == 0
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    assert main(["train", "run.toml", "--from", "runs/a/checkpoints/step-00000002", "--set", "args.max_steps=3"]) == 0
    assert steps(folder) == [1, 2, 3]
    assert main(["train", "run.toml", "--start-over", "--set", "args.max_steps=1"]) == 0
    assert steps(folder) == [1]


def test_a_run_that_is_stopped_says_so_to_the_shell(folder: Path) -> None:
    assert main(["train", "run.toml", "--set", "callbacks.own_run:Stop.step=2"]) == 1
    assert steps(folder) == [1, 2]


def test_a_run_that_was_stopped_for_good_goes_on_when_told_to(folder: Path) -> None:
    (folder / "final_run.py").write_text(OWN_TRAINING.replace('stop("enough")', 'stop("enough", final=True)'))
    (folder / "run.toml").write_text(RUN.replace("own_run", "final_run"))
    command = ["train", "run.toml", "--set", "callbacks.final_run:Stop.step=2"]
    assert main(command) == main(command) == 1
    assert steps(folder) == [1, 2]
    assert main([*command, "--continue-stopped"]) == 0
    assert steps(folder) == [1, 2, 3, 4]


def test_a_check_prints_every_setting_and_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--check", "--set", "factory.length=40"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["args"]["max_steps"] == 4
    assert settings["factory"] == {"length": 40}
    assert [each["use"] for each in settings["callbacks"]] == ["JsonLogger", "InfoCallback"]
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rnu.toml"], "rnu.toml: no such file"),
        (["run.toml", "--set", "args.max_step=1"], "--set args.max_step=1: unknown argument 'max_step'; did you mean"),
        (["run.toml", "--set", "trainer=own_run:biuld"], "unknown function of own_run 'biuld'; did you mean"),
        (["run.toml", "--from", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_work_is_one_line_and_2(
    words: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1
