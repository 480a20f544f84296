"""``dalsegno jobs``, as it is typed, against a real training."""

from __future__ import annotations

import getpass
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from cli.command import DALSEGNO, environment
from control.job import controlled_trainer
from control.talking import wait_until
from dalsegno.callbacks import TrainerControlCallback
from dalsegno.cli import main
from dalsegno.control.client import sender
from dalsegno.control.jobs import Registration, jobs_directory, list_jobs

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "dalsegno" / "jobs"


class Training:
    """A run that trains on a thread of its own until it is stopped."""

    def __init__(self, output_dir: Path, *callbacks: ds.Callback, **options: Any) -> None:
        self.trainer = controlled_trainer(output_dir, TrainerControlCallback(**options), *callbacks)
        self.result: Any = None
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        wait_until(lambda: any(job.job_id == options["job_id"] for job in list_jobs()))

    def _train(self) -> None:
        self.result = self.trainer.train()

    def end(self) -> Any:
        self.trainer.stop()
        self._thread.join()
        return self.result


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "runs/a", job_id="first")
    yield training
    training.end()


def output(capsys: Capture, *words: str) -> str:
    assert main(["jobs", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *words: str) -> str:
    assert main(["jobs", *words]) == 2
    return capsys.readouterr().err


def test_a_job_is_listed_shown_saved_and_stopped(training: Training, tmp_path: Path, capsys: Capture) -> None:
    assert [word in output(capsys, "list") for word in ("first", "running", "runs/a")] == [True] * 3
    (row,) = json.loads(output(capsys, "list", "--json"))
    assert (row["job_id"], row["state"], row["pid"]) == ("first", "running", os.getpid())
    assert "of 100,000" in output(capsys, "status", "first")
    assert json.loads(output(capsys, "status", "fir", "--json"))["job_id"] == "first"
    saved = output(capsys, "save", "runs/a")
    step = int(saved.removeprefix("save_checkpoint: took effect at the end of step "))
    wait_until((tmp_path / f"runs/a/checkpoints/step-{step:08d}").is_dir)
    assert "took effect" in output(capsys, "evaluate", "first")
    assert "took effect" in output(capsys, "set", "first", "learning_rate=x0.5", "max_steps=90000")
    assert "took effect" in output(capsys, "switch", "first", "JsonLogger", "off")
    assert "switched off" in output(capsys, "callbacks", "first")
    assert "took effect" in output(capsys, "switch", "first", "JsonLogger", "on")
    assert "took effect" in output(capsys, "log", "first")
    assert json.loads(output(capsys, "status", "first", "--json"))["learning_rate"] == 0.005
    assert "of 90,000" in output(capsys, "status", "first")
    stopped = json.loads(output(capsys, "stop", "first", "--json"))
    training._thread.join()
    assert training.result.stopped_by == f"{getpass.getuser()}@{os.uname().nodename}"
    assert (stopped["status"], stopped["step"]) == ("done", training.result.global_step)
    assert output(capsys, "list") == "no jobs\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["save", "second"], "'second': no such job is running here"),
        (["save"], "name a JOB"),
        (["set", "first", "learning_rat=1"], "did you mean 'learning_rate'?"),
        (["set", "first", "save_steps"], "write NAME=VALUE"),
        (["set", "first", "save_steps=soon"], "needs a number"),
        (["set", "first", "save_steps=1", "save_steps=2"], "given twice"),
        (["set", "first"], "names no setting"),
        (["switch", "first", "JsonLogger"], "needs JOB KEY on"),
        (["switch", "first", "JsonLoger", "off"], "did you mean 'JsonLogger'?"),
        (["abort", "first"], "add --force"),
        (["save", "first", "--wait", "-1"], "--wait -1"),
        (["status", "--remote", "nowhere"], "needs HOST:PORT"),
        (["sve", "first"], "did you mean 'save'?"),
    ],
)
def test_what_cannot_be_is_refused(training: Training, capsys: Capture, words: list[str], message: str) -> None:
    assert message in refused(capsys, *words)


def test_two_jobs_are_told_apart(training: Training, tmp_path: Path, capsys: Capture) -> None:
    other = Training(tmp_path / "runs/b", job_id="first-b")
    try:
        assert len(json.loads(output(capsys, "list", "--json"))) == 2
        assert "names 2 running jobs: first-b, first" in refused(capsys, "save", "fir")
        assert json.loads(output(capsys, "status", "first", "--json"))["job_id"] == "first"  # an id as it stands
        assert json.loads(output(capsys, "status", "runs/b", "--json"))["job_id"] == "first-b"
    finally:
        other.end()


def test_a_job_without_a_server_takes_commands_by_its_folder(tmp_path: Path, capsys: Capture) -> None:
    training = Training(tmp_path / "runs/a", job_id="quiet", enable_http=False)
    assert "took effect" in output(capsys, "log", "quiet")
    assert "took effect" in output(capsys, "save", "runs/a")
    assert "did you mean 'save_steps'?" in refused(capsys, "set", "runs/a", "save_step=1")
    status = json.loads(output(capsys, "status", "quiet", "--json"))
    assert status["job_id"] == "quiet"
    assert status["global_step"] >= 1
    assert status["loss"] > 0
    assert "has no server" in refused(capsys, "callbacks", "quiet")
    assert "took effect" in output(capsys, "stop", "runs/a")
    assert training.end().stopped_by == sender()
    assert "runs/a: no run is training here" in refused(capsys, "save", "runs/a")


OF_THE_EXTRA = ("httpx", "starlette", "uvicorn", "prometheus_client")
EACH = """
import sys
from dalsegno.cli import main

errors, sys.stderr = sys.stderr, sys.stdout
for number, words in enumerate(sys.argv[1:]):
    print(end="\\0" if number else "")
    main(words.split())
sys.stderr = errors
"""
"""Runs these commands; what a command says, on either stream, is divided by a zero."""


def test_without_the_extra_jobs_are_reached_through_their_files(tmp_path: Path) -> None:
    """In a process whose packages are those of this environment but for the extra's; which imports them once."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(OF_THE_EXTRA) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    source = Path(ds.__file__).parents[1]

    expected = {
        "jobs log first": "took effect",
        "jobs status first": "loss",
        "jobs callbacks first": "dalsegno[control]",
        "jobs open": "dalsegno[control]",
        "diloco serve -o outer -n 1": "dalsegno[control]",
        "jobs stop first": "took effect",
    }
    training = Training(tmp_path / "runs/a", job_id="first")
    command = [sys.executable, "-S", "-c", EACH, *expected]
    paths = {"PYTHONPATH": f"{source}{os.pathsep}{packages}"}
    result = subprocess.run(command, capture_output=True, text=True, env={**environment(), **paths}, cwd=tmp_path)
    training.end()
    said = result.stdout.split("\0")
    assert [part in text for part, text in zip(expected.values(), said, strict=True)] == [True] * 6, result
    assert result.stderr == ""


def test_abort_asks_on_a_terminal(training: Training) -> None:
    assert "not aborted" in typed(["abort", "first"], "no\n")
    assert training.result is None
    assert "abort: took effect" in typed(["abort", "first"], "y\n")
    training._thread.join()
    assert training.result.reason == "aborted"


def typed(words: Sequence[str], line: str) -> str:
    """What the command prints on a terminal where ``line`` is typed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [DALSEGNO, "jobs", *words], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment()
    )
    os.write(ours, line.encode())
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    return out.decode()


def test_a_job_elsewhere_is_reached_by_its_address(
    training: Training, tmp_path: Path, registry: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token from a file or the environment, and without any file of the job."""
    port = list_jobs()[0].endpoint.port  # type: ignore[union-attr]
    token = (registry / "first" / "auth_token").read_text()
    (tmp_path / "token").write_text(token + "\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    remote = ["--remote", f"127.0.0.1:{port}", "--token-file", "token"]
    assert "of 100,000" in output(capsys, "status", *remote)
    assert "took effect" in output(capsys, "save", *remote)
    assert "took effect" in output(capsys, "set", *remote, "save_steps=50")
    assert "took effect" in output(capsys, "switch", *remote, "JsonLogger", "off")
    assert "its job is first, not other" in refused(capsys, "save", "other", *remote)
    (tmp_path / "token").write_text("wrong")
    assert "the token is missing or wrong" in refused(capsys, "status", *remote)
    assert "the token is missing or wrong" in refused(capsys, "status", *remote[:2])
    monkeypatch.setenv("DALSEGNO_TOKEN", token)
    assert "first" in output(capsys, "status", *remote[:2])
    assert "Connection refused" in refused(capsys, "list", "--remote", "127.0.0.1:9", *remote[2:])


def test_watch_shows_all_jobs(training: Training, tmp_path: Path, capsys: Capture, registry: Path) -> None:
    Registration("gone", Path("runs/b"), Path("runs/b")).publish("127.0.0.1", 1, None)
    path = registry / "gone" / "endpoint.json"
    path.write_text(path.read_text().replace('"process_start": ', '"process_start": 1'))

    def rows_of_second_update() -> dict[str, Any]:
        lines = output(capsys, "watch", "--updates", "2", "--interval", "0.2", "--json").splitlines()
        return {row["job_id"]: row for row in json.loads(lines[1])}

    rows = wait_until(lambda: (rows := rows_of_second_update())["first"]["steps_per_second"] and rows)
    assert "100,000" in rows["first"]["step"]
    assert rows["gone"]["state"] == "dead"
    assert "steps/s" in output(capsys, "watch", "--updates", "1")


def test_watch_redraws_a_terminal_until_ctrl_c(training: Training) -> None:
    ours, theirs = pty.openpty()
    command = [DALSEGNO, "jobs", "watch", "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    shown = b""
    while shown.count(b"first") < 3:  # drawn, and drawn again
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.close(ours)


def test_cleanup_removes_what_is_dead(training: Training, registry: Path, capsys: Capture) -> None:
    Registration("gone", Path("runs/b"), Path("runs/b")).publish("127.0.0.1", 1, "token")
    path = registry / "gone" / "endpoint.json"
    path.write_text(path.read_text().replace('"process_start": ', '"process_start": 1'))
    assert "its process" in refused(capsys, "save", "gone")
    assert output(capsys, "cleanup") == "removed gone\n"
    assert output(capsys, "cleanup") == "nothing to remove\n"
    assert "running" in output(capsys, "list")


def test_the_page_gets_a_token_in_a_private_file(
    training: Training, registry: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in an address that is sent nor on the browser's command line; the job's own token not even there."""
    opened: list[tuple[str, str]] = []

    def browse(address: str) -> bool:
        file = Path(address.removeprefix("file://"))
        assert file.stat().st_mode & 0o777 == 0o600
        opened.append((address, file.read_text()))
        threading.Thread(target=interrupt_once_served, args=[file.read_text()]).start()
        return True

    monkeypatch.setattr("webbrowser.open", browse)
    output(capsys, "open", "first")
    ((address, content),) = opened
    (token,) = re.findall(r"#token=(\w+)", content)
    assert token not in address
    assert (registry / "first" / "auth_token").read_text() not in content
    assert not Path(address.removeprefix("file://")).exists()


def test_over_ssh_the_page_is_where_its_port_is_forwarded_to(
    training: Training,
) -> None:
    """The page's token is in the address, which only the terminal shows; a job's own is not."""
    over_ssh = {**environment(), "SSH_CONNECTION": "10.0.0.2 50000 10.0.0.7 22"}
    command = [DALSEGNO, "jobs", "open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=over_ssh) as process:
        assert process.stdout is not None
        address, forward = process.stdout.readline().strip(), process.stdout.readline().strip()
        found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/)#token=(\w{64})&by=.+%40.+", address)
        assert found is not None, address
        page, port, token = found.groups()
        assert f"ssh -L {port}:127.0.0.1:{port} {sender()}" in forward
        asked = urllib.request.Request(f"{page}jobs", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert [each["job_id"] for each in json.load(answer)["jobs"]] == ["first"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    server = list_jobs()[0].endpoint
    own = (jobs_directory() / "first" / "auth_token").read_text()
    remote = ["--remote", f"127.0.0.1:{server.port}"]  # type: ignore[union-attr]
    done = subprocess.run(
        [*command, *remote], capture_output=True, text=True, env={**over_ssh, "DALSEGNO_TOKEN": own}, check=True
    )
    assert f"http://127.0.0.1:{server.port}/#by=" in done.stdout and own not in done.stdout  # type: ignore[union-attr]


def interrupt_once_served(content: str) -> None:
    """Press Ctrl-C once the address in the page answers."""
    (address,) = re.findall(r"(http://[\d.:]+)/#", content)
    with urllib.request.urlopen(address, timeout=60):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_no_command_of_jobs_imports_torch() -> None:
    script = (
        "import sys\nfrom dalsegno.cli import main\n"
        "assert main(['jobs', 'list']) == 0\nassert 'httpx' not in sys.modules\n"
        "main(['jobs', 'status', 'nobody'])\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class LogsEscapes(ds.Callback):
    evil = "\x1b]0;pwned\x07\nstep"

    def on_log_step(self, ctx: ds.LogContext) -> None:
        ctx.logs[self.evil] = 1.0


def test_what_a_job_says_does_not_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    """A name that a program logged is printed, not obeyed."""
    training = Training(tmp_path / "runs/a", LogsEscapes(), job_id="first")
    output(capsys, "log", "first")
    shown = wait_until(lambda: "pwned" in (text := output(capsys, "status", "first")) and text)
    training.end()
    assert not [each for each in shown if not each.isprintable() and each != "\n"]
