"""``dalsegno train`` on files and modules that lie in the user's own folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cli.command import cold, dalsegno
from dalsegno.cli import main
from dalsegno.logs import read_records

OWN_TRAINING = """
import signal
import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data


class Stop(ds.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, ctx):
        if ctx.step == self.step:
            ctx.control.stop("enough")


class Signal(ds.Callback):
    def __init__(self, number: int):
        self.number = number

    def on_step_end(self, ctx):
        if ctx.step == 2:
            signal.raise_signal(self.number)


class BrokenLoss(ds.Callback):
    def on_before_backward(self, ctx):
        ctx.outputs["loss"] = ctx.outputs["loss"] * float("nan")


class Faulty(ds.Callback):
    def on_step_end(self, ctx):
        raise RuntimeError("broken")


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
    done = cold("train", "run.toml", "--set", "args.save_steps=2", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "output     runs/a" not in done.stdout, "the InfoCallback is switched off"
    assert main(["train", "run.toml", "--set", "args.max_steps=6"]) == 0
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    assert main(["train", "run.toml", "--from", "runs/a/checkpoints/step-00000002", "--set", "args.max_steps=3"]) == 0
    assert steps(folder) == [1, 2, 3]
    assert main(["train", "run.toml", "--start-over", "--set", "args.max_steps=1"]) == 0
    assert steps(folder) == [1]


STATUSES = {
    "stopped by a callback": (["callbacks.own_run:Stop.step=2"], 0, 0),
    "stopped by a signal": ([f"callbacks.own_run:Signal.number={signal.SIGUSR1:d}"], 75, 0),
    "stopped by its time limit": (["args.max_seconds=1e-6"], 75, 75),
    "diverged by CheckLoss": (["callbacks.own_run:BrokenLoss.enabled=true", "callbacks.CheckLoss.name=c"], 3, 3),
    "diverged by NaNChecker": (["callbacks.own_run:BrokenLoss.enabled=true", "callbacks.NaNChecker.name=c"], 3, 3),
    "diverged by DivergenceDetector": (
        [f"callbacks.DivergenceDetector.{each}" for each in ("threshold=0.1", "warmup=0", "patience=1", "mode=max")],
        3,
        3,
    ),
}
"""Overrides, and the exit status of the command and of the same command again."""


@pytest.mark.parametrize("how", STATUSES)
def test_the_exit_status_tells_how_a_run_ended(how: str, folder: Path) -> None:
    overrides, first, second = STATUSES[how]
    command = ["train", "run.toml", *(word for each in overrides for word in ("--set", each))]
    assert [main(command), main(command)] == [first, second]


def test_an_error_is_1_with_or_without_a_traceback(folder: Path) -> None:
    faulty = dalsegno("train", "run.toml", "--set", "callbacks.own_run:Faulty.enabled=true", folder=folder)
    assert faulty.returncode == 1 and "RuntimeError: broken" in faulty.stderr
    assert main(["train", "run.toml", "--set", "args.save_steps=2"]) == 0
    for file in (folder / "runs" / "a" / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["train", "run.toml", "--set", "args.max_steps=6"]) == 1, "no checkpoint verifies"


def test_a_run_that_was_stopped_for_good_goes_on_when_told_to(folder: Path) -> None:
    (folder / "final_run.py").write_text(OWN_TRAINING.replace('stop("enough")', 'stop("enough", final=True)'))
    (folder / "run.toml").write_text(RUN.replace("own_run", "final_run"))
    command = ["train", "run.toml", "--set", "callbacks.final_run:Stop.step=2"]
    assert main(command) == main(command) == 0
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
        (["own_run:build"], "own_run:build: needs a file; a function is for 'dalsegno launch"),
    ],
)
def test_what_cannot_work_is_one_line_and_2(
    words: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
