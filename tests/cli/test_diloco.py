"""``dalsegno diloco``: a server and a worker as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from cli.command import DALSEGNO
from dalsegno.checkpoint import CheckpointManager, saved_states
from dalsegno.cli import diloco, main
from dalsegno.diloco import DiLoCoServer, Rules, WorkerOptions
from dalsegno.logs import read_records
from diloco.scenes import train_by_hand
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


@pytest.mark.parametrize(
    ("words", "given", "optimizer"),
    [
        (
            "-n 3 --async --dn-buffer-size 2 --dylu --dylu-base-sync-every 9 --heartbeat-timeout 7 --min-workers 2 "
            "--save-every 1 --outer-lr 0.5 --outer-momentum 0.8 --disable-auth",
            {"num_workers": 3, "min_workers": 2, "heartbeat_timeout": 7.0, "save_every": 1}
            | {"asynchronous": True, "dylu": True, "dylu_base_sync_every": 9},
            "DelayedNesterov(lr=0.5, momentum=0.8, buffer_size=2)",
        ),
        ("-n 1 --no-nesterov --host localhost", {"num_workers": 1}, "SGD(lr=0.7, momentum=0.9, dampening=0, "),
    ],
)
def test_options_of_serve_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, given: dict[str, Any], optimizer: str
) -> None:
    """A worker trains with it, and then a signal ends it."""
    begun: SimpleQueue[DiLoCoServer] = SimpleQueue()

    class Watched(DiLoCoServer):
        def start(self) -> None:
            super().start()
            begun.put(self)

    arrived, wake = os.pipe()
    monkeypatch.setattr(diloco, "_signals_arrive", lambda: arrived)
    monkeypatch.setattr("dalsegno.diloco.DiLoCoServer", Watched)
    seen: list[Any] = []

    def use() -> None:
        server = begun.get()
        try:
            seen.extend([server.coordinator.rules, server.address, server.token is None])
            train_by_hand(server, 0, 4, sync_every=4)
        finally:
            os.write(wake, b"\0")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    user = threading.Thread(target=use)
    user.start()
    assert main(["diloco", "serve", "-o", str(tmp_path), "--port", str(port), *words.split()]) == 0
    user.join()
    host = "localhost" if "localhost" in words else "127.0.0.1"
    assert seen == [Rules(**given), f"http://{host}:{port}", "--disable-auth" in words]
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 1
    saved = saved_states(found)["diloco"][0]["optimizer"]
    assert saved.startswith(optimizer) and ("nesterov=False" in saved or "Delayed" in saved)


def test_options_of_a_worker_reach_its_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SERVER", "INT8_COMM", "OVERLAP_STEPS", "TIMEOUT"):
        monkeypatch.setenv(f"DILOCO_{name}", "7")  # which is restored at the end
    assert (
        main(["diloco", *WORKER, "--int8-comm", "--overlap-steps", "5", "--timeout", "60", *TRAIN]) == 2
    )  # no such file
    assert WorkerOptions().with_environment() == WorkerOptions("h:1", int8_comm=True, overlap_steps=5, timeout=60.0)
