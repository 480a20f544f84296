"""TrainerControlCallback around real trainings, steered by a client of the old API, over HTTP and through files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from control.job import Pause, controlled_trainer
from control.talking import OldClient, Stream, ask, connect, wait_until
from dalsegno.callbacks import JsonLogger, TrainerControlCallback
from dalsegno.callbacks.control.trainer_control import log_path_of
from dalsegno.control.jobs import list_jobs, remove_dead
from dalsegno.errors import ConfigurationError, NotRunning
from dalsegno.logs.reader import read_records
from dalsegno.testing import run_ranks
from dalsegno.web import server
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.small import same, weights
from support.warm import Program


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has its own jobs; none is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path / "state" / "dalsegno" / "jobs"
    assert [job.job_id for job in list_jobs() if job.state == "running"] == []


class ClosedWhileItIsRead(JsonLogger):
    """Has a path when it is first asked, and none after that."""

    def __init__(self, path: Path) -> None:
        self._paths = [path]

    @property
    def log_path(self) -> Path | None:
        return self._paths.pop() if self._paths else None


class Job:
    """What a client needs of the job ``me``: its port and token."""

    def __init__(self) -> None:
        self.old = OldClient()
        found = wait_until(self.old.list_jobs)[0]
        self.job_id, self.port, self.output_dir = found["job_id"], found["port"], found["output_dir"]
        path = self.old.jobs / self.job_id / "auth_token"
        self.token = path.read_text() if path.exists() else None

    def command(self, command: str, wait: float = 60, **data: Any) -> dict[str, Any]:
        """Sent, and waited for."""
        path = f"/jobs/{self.job_id}/control?wait={wait}"
        answer = ask(self.port, "POST", path, {"command": command, "data": data}, token=self.token)
        assert answer.status == 200, answer.body
        return dict(answer.json)

    def get(self, what: str) -> Any:
        return ask(self.port, "GET", f"/jobs/{self.job_id}/{what}", token=self.token).json


def steered(trainer: Any, steer: Callable[[Job], Any]) -> tuple[Any, Any]:
    """Train here, while ``steer`` runs on a thread; its answer, and the training's."""
    answers: list[Any] = []

    def client() -> None:
        try:
            answers.append(steer(Job()))
        except BaseException as error:
            answers.append(error)
            os.kill(os.getpid(), signal.SIGTERM)  # ends the training

    thread = threading.Thread(target=client)
    thread.start()
    result = trainer.train()
    thread.join()
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0], result


def start_job(folder: Path, *options: str) -> Program:
    """A training process of its own."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    return Program(
        [tests / "control" / "job.py", folder, *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_client_of_the_old_api_works_unchanged(tmp_path: Path) -> None:
    """It finds a process, asks it, saves, is refused an unknown command, stops it; nothing of the job is left."""
    with start_job(tmp_path / "run") as process:
        client = OldClient()
        job = wait_until(client.list_jobs)[0]
        assert (job["host"], job["pid"], job["output_dir"]) == ("127.0.0.1", process.pid, str(tmp_path / "run"))
        assert job["logging_dir"] == str(tmp_path / "run" / "logs")
        assert 8900 <= job["port"] <= 8999
        assert abs(job["started_at"] - time.time()) < 600
        status = client.get_status(job["job_id"])
        assert (status["job_id"], status["status"], status["max_steps"]) == (job["job_id"], "running", 100_000)
        assert {"timestamp", "global_step", "epoch"} <= set(status)
        saved = client.send_command(job["job_id"], "save_checkpoint")
        assert (saved.status, saved.json["status"], saved.json["command"]) == (200, "acknowledged", "save_checkpoint")
        assert isinstance(saved.json["timestamp"], float) and isinstance(saved.json["message"], str)
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step-????????")))
        assert client.send_command(job["job_id"], "status").status == 200
        unknown = client.send_command(job["job_id"], "explode")
        assert unknown.status == 400
        assert "explode" in unknown.json["error"]
        assert {"graceful_stop", "save_checkpoint", "save_and_stop", "abort", "status"} <= set(
            unknown.json["valid_commands"]
        )
        token = (client.jobs / job["job_id"] / "auth_token").read_text()
        assert len(token) == 64
        assert client.send_command(job["job_id"], "graceful_stop").status == 200
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.split()[0] == "stopped"
    assert client.list_jobs() == []
    assert list(client.jobs.iterdir()) == []
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert token.encode() not in everything
    assert token not in out + err


def test_every_command_takes_effect_at_a_step(tmp_path: Path) -> None:
    def steer(job: Job) -> dict[str, dict[str, Any]]:
        answers = {
            "save_checkpoint": job.command("save_checkpoint"),
            "evaluate": job.command("evaluate"),
            "set": job.command("set", learning_rate={"factor": 0.5}, max_steps=90_000),
            "log": job.command("log"),
            "switch": job.command("switch", callback="JsonLogger", on=False),
        }
        assert {each["key"]: each["on"] for each in job.get("callbacks")["callbacks"]}["JsonLogger"] is False
        records = job.get("records")["records"]
        assert [record["global_step"] for record in records if record.get("kind") == "eval"] == [
            answers["evaluate"]["step"]
        ]
        assert records[-1]["global_step"] == answers["log"]["step"]
        assert records[-1]["learning_rate"] == 0.005
        assert job.get("status")["max_steps"] == 90_000
        answers["graceful_stop"] = job.command("graceful_stop")
        return answers

    trainer = controlled_trainer(tmp_path / "run", TrainerControlCallback())
    answers, result = steered(trainer, steer)
    assert {name: answer["status"] for name, answer in answers.items()} == dict.fromkeys(answers, "done")
    steps = [answer["step"] for answer in answers.values()]
    assert steps == sorted(steps)
    assert (result.reason, result.stopped_by) == ("stopped", "HTTP client 127.0.0.1")
    assert result.global_step == steps[-1]
    assert (tmp_path / f"run/checkpoints/step-{steps[0]:08d}").is_dir()


@pytest.mark.parametrize(("command", "saved"), [("abort", False), ("save_and_stop", True)])
def test_commands_that_end_the_run(tmp_path: Path, command: str, saved: bool) -> None:
    answer, result = steered(
        controlled_trainer(tmp_path / "run", TrainerControlCallback()), lambda job: job.command(command)
    )
    assert (answer["status"], answer["step"]) == ("done", result.global_step)
    assert result.reason == ("stopped" if saved else "aborted")
    assert (tmp_path / f"run/checkpoints/step-{result.global_step:08d}").is_dir() is saved


def two_ranks(output_dir: Path) -> tuple[str, int, list[Any]]:
    trainer = controlled_trainer(output_dir, TrainerControlCallback(), pause=0.005)
    result = trainer.train()
    return result.reason, result.global_step, [float(each.sum()) for each in weights(trainer).values()]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_carry_out_commands_together(tmp_path: Path, parallel: str) -> None:
    """Rank 0 alone listens; both act at the step that the answer names."""
    answers: list[Any] = []

    def steer() -> None:
        job = Job()
        answers.append(job.command("save_checkpoint"))
        answers.append(job.command("set", learning_rate=0.001))
        answers.append(job.command("evaluate"))
        answers.append(job.command("graceful_stop"))

    client = threading.Thread(target=steer)
    client.start()
    ranks = run_ranks(two_ranks if parallel == "ddp" else two_sharded_ranks, 2, tmp_path / "run")
    client.join()
    assert [answer["status"] for answer in answers] == ["done"] * 4
    assert [(reason, step) for reason, step, _ in ranks] == [("stopped", answers[-1]["step"])] * 2
    assert (tmp_path / f"run/checkpoints/step-{answers[0]['step']:08d}").is_dir()


def two_sharded_ranks(output_dir: Path) -> tuple[str, int, list[Any]]:
    trainer = controlled_trainer(output_dir, TrainerControlCallback(), pause=0.005, parallel="fsdp")
    result = trainer.train()
    return result.reason, result.global_step, []


def test_the_status_needs_no_step_of_the_training(tmp_path: Path) -> None:
    """The training stands still until a client has been answered."""
    answered = threading.Event()

    def stand_still(ctx: Any) -> None:
        if ctx.step == 3:
            assert answered.wait(60)

    def steer(job: Job) -> None:
        wait_until(lambda: job.get("status")["global_step"] == 3)
        assert job.get("records")["records"]
        assert "dalsegno_global_step 3.0" in ask(job.port, "GET", "/metrics", token=job.token).body.decode()
        answered.set()

    trainer = controlled_trainer(
        tmp_path / "run", TrainerControlCallback(), Listener({"on_step_end": stand_still}), steps=5
    )
    _, result = steered(trainer, steer)
    assert result.global_step == 5


def test_a_command_to_a_job_that_is_just_ending_is_answered_or_refused(tmp_path: Path) -> None:
    """Commands without pause, until nothing listens any more: each has an effect, or an answer that says why not."""
    answers: list[tuple[int, Any]] = []

    def wait_for_the_first(ctx: Any) -> None:
        if ctx.step == 30:
            wait_until(lambda: answers or ctx.trainer.commands.waiting())

    def steer(job: Job) -> None:
        while True:
            try:
                body = {"command": "log"}
                answer = ask(job.port, "POST", f"/jobs/{job.job_id}/control?wait=60", body, token=job.token)
            except OSError:
                return
            answers.append((answer.status, answer.json))

    waiting = Listener({"on_step_end": wait_for_the_first})
    _, result = steered(controlled_trainer(tmp_path / "run", TrainerControlCallback(), waiting, steps=60), steer)
    assert result.global_step == 60
    assert answers
    for status, answer in answers:
        assert (status == 200 and answer["step"] is not None) or "end" in answer["error"], answer


def test_a_killed_jobs_file_commands_nobody(tmp_path: Path, registry: Path) -> None:
    from dalsegno.control.client import JobClient, resolve, send_command

    with start_job(tmp_path / "run", "--job-id", "killed") as process:
        wait_until(OldClient().list_jobs)
        process.send_signal(signal.SIGKILL)
    assert [(job.job_id, job.state) for job in list_jobs()] == [("killed", "dead")]
    with pytest.raises(NotRunning, match="has ended without removing its file"):
        JobClient.of(resolve("killed"))
    with pytest.raises(NotRunning, match="no run is training here"):
        send_command(str(tmp_path / "run"), "save_checkpoint")
    assert [job.job_id for job in remove_dead()] == ["killed"]
    assert list(registry.iterdir()) == []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_taken_port_is_said_once_and_the_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = server.listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    seen = []
    look = Listener({"on_step_end": lambda ctx: seen.append([(job.state, job.endpoint.port) for job in list_jobs()])})
    result = controlled_trainer(tmp_path, TrainerControlCallback(port=port), look, steps=3).train()
    assert result.reason == "finished"
    (warning,) = warnings(caplog)
    assert f"port {port}" in warning and "training continues without a server" in warning
    assert seen == [[("running", None)]] * 3  # listed, so that it is found; commands go into its folder
    taken.close()


@pytest.mark.parametrize("asked_for", [None, True])
def test_without_the_libraries_nothing_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asked_for: bool | None
) -> None:
    monkeypatch.setattr(server, "_NEEDED", ("starlette", "no_such_library"))
    trainer = controlled_trainer(tmp_path, TrainerControlCallback(enable_http=asked_for), steps=3)
    assert trainer.train().reason == "finished"
    assert len(warnings(caplog)) == bool(asked_for)
    assert not asked_for or "needs no_such_library, which is not installed" in warnings(caplog)[0]


def test_a_state_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert controlled_trainer(tmp_path / "run", TrainerControlCallback(), steps=3).train().reason == "finished"
    assert len(warnings(caplog)) == 1


def test_a_server_that_breaks_during_training_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_(self: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(uvicorn.Server, "main_loop", break_)
    ended = threading.Event()
    seen = []

    def wait_for_the_end(ctx: Any) -> None:
        if ctx.step == 1:
            wait_until(lambda: warnings(caplog))
            wait_until(lambda: list_jobs()[0].endpoint.port is None)
            ended.set()
        seen.append(ctx.step)

    trainer = controlled_trainer(
        tmp_path, TrainerControlCallback(), Listener({"on_step_end": wait_for_the_end}), steps=3
    )
    assert trainer.train().reason == "finished"
    assert ended.is_set() and seen == [1, 2, 3]
    (warning,) = warnings(caplog)
    assert "the server ended (MemoryError: no more); training continues" in warning


def test_without_a_server_commands_go_through_files(tmp_path: Path) -> None:
    """The same call as over HTTP, given the output_dir."""
    from dalsegno.control.client import send_command

    answers: list[Any] = []

    def steer() -> None:
        wait_until(lambda: list_jobs())
        answers.append(send_command(str(tmp_path / "run"), "save_checkpoint", wait=60))
        with pytest.raises(ConfigurationError, match="learning_rate"):
            send_command(str(tmp_path / "run"), "set", {"learning_rat": 1})
        answers.append(send_command(str(tmp_path / "run"), "graceful_stop", wait=60))

    client = threading.Thread(target=steer)
    client.start()
    result = controlled_trainer(tmp_path / "run", TrainerControlCallback(enable_http=False)).train()
    client.join()
    assert [answer["status"] for answer in answers] == ["done", "done"]
    assert result.global_step == answers[-1]["step"]
    assert (tmp_path / f"run/checkpoints/step-{answers[0]['step']:08d}").is_dir()


def test_a_second_training_has_a_server_again(tmp_path: Path) -> None:
    """With the same id and the same token."""
    control = TrainerControlCallback("again", auth_token="a token of my own".replace(" ", "-"))
    trainer = controlled_trainer(tmp_path, control)
    for _ in range(2):
        answer, result = steered(trainer, lambda job: (job.token, job.command("graceful_stop")["step"]))
        assert answer == ("a-token-of-my-own", result.global_step)


def test_workers_of_a_loader_answer_nobody(tmp_path: Path) -> None:
    """They are forked while the server runs, and live longer than the training: the port is free at its end."""
    control = TrainerControlCallback()
    trainer = controlled_trainer(
        tmp_path, control, dataloader_num_workers=2, dataloader_persistent_workers=True, pause=0.001
    )

    def steer(job: Job) -> int:
        for _ in range(20):
            assert job.get("status")["status"] == "running"
        job.command("graceful_stop")
        return int(job.port)

    port, _ = steered(trainer, steer)
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_stream_follows_a_run_across_its_restart(tmp_path: Path) -> None:
    """A client that continues where it was has the log in the end, without what the resume cut off of it; and each
    event once."""
    shown: list[Any] = []
    events: list[Any] = []

    def show(job: Job, last_id: str | None = None) -> str | None:
        stream = Stream(job.port, f"/jobs/{job.job_id}/stream", job.token or "", last_id)
        received = 0
        for kind, data in stream:
            if kind == "reset":
                shown.clear()
            elif kind == "record":
                shown.append(data)
                received += 1
            elif kind == "event":
                events.append(data)
            if received == 3:
                job.command("graceful_stop", wait=0)
                received += 1
        return stream.last_id

    last_id, _ = steered(controlled_trainer(tmp_path, TrainerControlCallback("s"), logging_steps=5), show)
    steered(controlled_trainer(tmp_path, TrainerControlCallback("s"), logging_steps=5), lambda job: show(job, last_id))
    assert shown == list(read_records(tmp_path / "logs/train.jsonl"))
    begins = [event["resumed_from"] is None for event in events if event["event"] == "train_begin"]
    assert begins == [True, False]
    assert [event["event"] for event in events].count("train_end") == 2


def test_a_run_around_the_users_own_loop_is_controlled_too(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path / "run", TrainerControlCallback(), Pause(0.002), max_steps=100_000)
    (callbacks, stopped), result = steered(loop, lambda job: (job.get("callbacks"), job.command("graceful_stop")))
    assert [each["key"] for each in callbacks["callbacks"]][-2:] == ["TrainerControlCallback", "Pause"]
    assert result.global_step == stopped["step"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"port": -1}, "port=-1"),
        ({"port": 65536}, "port=65536"),
        ({"port": "8900"}, "port='8900'"),
        ({"job_id": "../x"}, "job_id='../x'"),
        ({"host": ""}, "host=''"),
        ({"enable_http": 1}, "enable_http=1"),
        ({"disable_auth": None}, "disable_auth=None"),
        ({"host": "0.0.0.0", "disable_auth": True}, "disable_auth=True with host="),
        ({"auth_token": "short"}, "at least 16"),
        ({"certfile": "x.pem"}, "belong together"),
        ({"certfile": "x.pem", "keyfile": "y.pem"}, "certfile='x.pem'"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        TrainerControlCallback(**arguments)


def test_no_token_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with what it means; then anybody here may ask."""
    control = TrainerControlCallback(disable_auth=True)
    answer, _ = steered(
        controlled_trainer(tmp_path, control),
        lambda job: (job.token, job.command("graceful_stop")["status"]),
    )
    assert answer == (None, "done")
    assert [text for text in warnings(caplog) if "disable_auth" in text] == [
        "TrainerControlCallback: disable_auth=True: every user of this machine can stop this job"
    ]


def test_asking_leaves_the_training_alone(tmp_path: Path) -> None:
    """Bit by bit the result of a run without requests. It does not last until those with a wrong token are refused."""
    abort = (
        "POST /jobs/{}/control HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\nContent-Length: 20\r\n\r\n"
    )

    def steer(job: Job) -> None:
        with ExitStack() as refused:
            for _ in range(20):
                job.get("status")
                job.get("records")
                ask(job.port, "GET", "/metrics", token=job.token)
                refused.enter_context(connect(job.port, abort.format(job.job_id).encode() + b'{"command": "abort"}'))

    alone = controlled_trainer(tmp_path / "alone", steps=100, pause=0)
    alone.train()
    asked = controlled_trainer(tmp_path / "asked", TrainerControlCallback(), steps=100)
    steered(asked, steer)
    assert same(weights(alone), weights(asked))
    assert not (tmp_path / "asked/control.jsonl").exists()


def test_the_path_of_a_log_that_closes_meanwhile_is_remembered(tmp_path: Path) -> None:
    path_now = log_path_of([ClosedWhileItIsRead(tmp_path / "train.jsonl")])
    assert path_now is not None
    assert [path_now(), path_now()] == [tmp_path / "train.jsonl"] * 2
