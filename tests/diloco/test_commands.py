"""``dalsegno diloco``: a server and a worker as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cli.command import DALSEGNO
from dalsegno.cli import main
from dalsegno.diloco import WorkerOptions
from dalsegno.logs import read_records
from support.warm import Program

TRAINING = """
import dalsegno as ds
from dalsegno.testing.tiny import TinyRegression, tiny_regression_data

def build(args, callbacks):
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(64), callbacks=callbacks)
"""
CONFIGURATION = """
trainer = "my_training:build"
callbacks = [{use = "JsonLogger"}, {use = "DiLoCoCallback"}]
[args]
output_dir = "run"
max_steps = 6
per_device_train_batch_size = 4
"""

WORKER, TRAIN = ["worker", "--server", "h:1"], ["--", "train", "run.toml"]


def test_a_server_and_a_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_training.py").write_text(TRAINING)
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    environment |= {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}  # threads of libraries, since their import
    server = subprocess.Popen(
        [DALSEGNO, "diloco", "serve", "-o", "outer", "-n", "1", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        token_file = tmp_path / server.stdout.readline().split()[1]
        reach = ["--server", address, "--token-file", str(token_file)]
        words = ["worker", *reach, "--sync-every", "3", "--worker-id", "w", "--", "train", "run.toml"]
        assert Program([DALSEGNO, "diloco", *words], folder=tmp_path, env=environment).wait() == 0
        synced = [each for each in read_records(tmp_path / "run/logs/train.jsonl") if each.get("kind") == "sync"]
        assert [(each["global_step"], each["version"]) for each in synced] == [(3, 1), (6, 2)]
        assert main(["diloco", "status", *reach]) == 0
        shown = capsys.readouterr().out
        assert "synchronous" in shown and "left" in shown
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.kill()
        server.wait()
    assert (tmp_path / "outer/checkpoints/step-00000002/manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "-o", "x", "-n", "0"], "num_workers=0"),
        (["serve", "-o", "x", "-n", "2", "--min-workers", "3"], "min_workers=3; more than num_workers=2"),
        (["serve", "-o", "x", "-n", "2", "--dn-buffer-size", "2"], "--dn-buffer-size needs --async"),
        (["serve", "-o", "x", "-n", "2", "--host", "0.0.0.0", "--disable-auth"], "disable_auth=True with host"),
        (["worker", "--server", "h:1"], "-- train"),
        (["worker", "--", "train", "run.toml"], "no server"),
        ([*WORKER, "--overlap-steps", "-1", *TRAIN], "DiLoCo: overlap_steps=-1"),
        ([*WORKER, "--overlap-steps", "9", "--sync-every", "4", *TRAIN], "overlap_steps=9 with sync_every=4"),
        ([*WORKER, "--mixing-factor", "1", *TRAIN], "DiLoCo: mixing_factor=1.0"),
        ([*WORKER, "--timeout", "0", *TRAIN], "DiLoCo: timeout=0.0"),
        ([*WORKER, "--max-sync-retries", "-2", *TRAIN], "DiLoCo: max_sync_retries=-2"),
        ([*WORKER, "--int8-comm", "--fp32-comm", *TRAIN], "not allowed with"),
        ([*WORKER, "--token-file", "gone", *TRAIN], "DILOCO_TOKEN_FILE='gone': No such file"),
        ([*WORKER, "--certificate", "gone", *TRAIN], "DILOCO_CERTIFICATE='gone': No such file"),
        (["status"], "no server"),
    ],
)
def test_wrong_use(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    try:
        assert main(["diloco", *words]) == 2
    except SystemExit as end:  # argparse's own
        assert end.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_worker_reach_its_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SERVER", "INT8_COMM", "OVERLAP_STEPS", "TIMEOUT"):
        monkeypatch.setenv(f"DILOCO_{name}", "7")  # which is restored at the end
    assert (
        main(["diloco", *WORKER, "--int8-comm", "--overlap-steps", "5", "--timeout", "60", *TRAIN]) == 2
    )  # no such file
    assert WorkerOptions().with_environment() == WorkerOptions("h:1", int8_comm=True, overlap_steps=5, timeout=60.0)
