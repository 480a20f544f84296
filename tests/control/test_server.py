"""The server of a job: what it answers, whom it refuses, and that no client can hold it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response

from control.talking import Answer, Stream, ask, connect, is_closed_by_peer, wait_until
from dalsegno.args import TrainingArguments
from dalsegno.control.api import MOST_STREAMS
from dalsegno.control.feed import Chunk, LiveJob, LogFile, MemoryLog
from dalsegno.control.queue import CommandQueue
from dalsegno.control.server import control_server
from dalsegno.errors import ConfigurationError
from dalsegno.logs import RecordLog
from dalsegno.logs.journal import Journal
from dalsegno.state import TrainerState
from dalsegno.web import connections, server
from dalsegno.web.security import Limits, check_access, tls_context
from dalsegno.web.server import ServerThread, listen

TOKEN = "0123456789abcdef" * 4  # the same in each process that collects tests


class Served:
    """A server of a job whose steps the test makes."""

    def __init__(self, folder: Path, *, token: str | None = TOKEN, log: Path | None = None, **options: Any) -> None:
        self.commands = CommandQueue(Journal(folder), TrainingArguments(folder, max_steps=100))
        self.commands.open()
        self.state = TrainerState()
        self.job = LiveJob(
            "job",
            self.commands,
            self.state,
            callbacks=lambda: [{"key": "A", "class": "A"}],
            history=dict,
            log_path=None if log is None else lambda: log,
        )
        listener = listen("127.0.0.1", None)
        self.port: int = listener.getsockname()[1]
        self.failures: list[BaseException] = []
        given = {"host": "127.0.0.1", "tls": None, **options}
        self.server = control_server(listener, self.job, token=token, on_failure=self.failures.append, **given)
        self.server.start()

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        return ask(self.port, method, path, body, **{"token": TOKEN, **options})

    def act(self, step: int) -> list[str]:
        """What a step boundary does: carry out what is waiting."""
        acted = self.commands.record(self.commands.waiting(), step)
        self.commands.resolve(acted)
        return [entry.command for entry in acted]


@pytest.fixture
def limits() -> Limits:
    return Limits(refusal_pause=0.0)


@pytest.fixture
def served(tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(server, "DEFAULT_LIMITS", limits)  # before the server's thread reads them
    served = Served(tmp_path)
    yield served
    served.server.stop()
    assert served.failures == []


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_command_is_acknowledged_once_it_is_on_disk(served: Served, tmp_path: Path) -> None:
    answer = served.ask("POST", "/jobs/job/control", {"command": "save_checkpoint", "data": {}})
    assert answer.status == 200
    known = {"status": "acknowledged", "command": "save_checkpoint"}
    assert {name: answer.json[name] for name in known} == known
    assert answer.json["message"] and abs(answer.json["timestamp"] - time.time()) < 60
    (line,) = (tmp_path / "control.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == answer.json["id"]
    assert json.loads(line)["by"] == "HTTP client 127.0.0.1"


def test_a_client_may_wait_for_the_effect_and_hears_the_step(served: Served) -> None:
    answers = []
    body = {"command": "evaluate"}
    client = threading.Thread(target=lambda: answers.append(served.ask("POST", "/jobs/job/control?wait=60", body)))
    client.start()
    wait_until(served.commands.waiting)
    assert served.act(7) == ["evaluate"]
    client.join()
    assert {name: answers[0].json[name] for name in ("status", "step", "error")} == {
        "status": "done",
        "step": 7,
        "error": None,
    }
    later = served.ask("GET", f"/jobs/job/commands/{answers[0].json['id']}")
    assert (later.json["status"], later.json["step"]) == ("done", 7)


def test_a_command_without_effect_says_why(served: Served) -> None:
    ticket = served.commands.submit("save_checkpoint", by="test")
    path = f"/jobs/job/commands/{ticket.id}"
    assert served.ask("GET", f"{path}?wait=0.01").json == {
        "status": "acknowledged",
        "id": ticket.id,
        "step": None,
        "error": None,
    }
    served.commands.close(5)
    assert served.ask("GET", path).json["status"] == "failed"
    assert "ended after step 5" in served.ask("GET", path).json["error"]
    refused = served.ask("POST", "/jobs/job/control", {"command": "save_checkpoint"})
    assert refused.status == 409
    assert "takes no more commands" in refused.json["error"]


def test_two_commands_at_once_are_two_commands(served: Served) -> None:
    clients = [
        threading.Thread(target=served.ask, args=("POST", "/jobs/job/control", {"command": "log"})) for _ in range(8)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert served.act(1) == ["log"] * 8


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"command": "explode"}, 400, "Unknown command: explode"),
        ({"command": None}, 400, "Unknown command: null"),
        ({"command": ["abort"]}, 400, "Unknown command"),
        ({}, 400, "Unknown command"),
        ({"command": "\ud800"}, 400, "Unknown command"),
        ({"command": "save_checkpoint", "data": [1]}, 400, "data"),
        ({"command": "save_checkpoint", "data": {"now": 1}}, 400, "now"),
        ({"command": "set", "data": {"max_steps": -5}}, 400, "max_steps=-5"),
        ({"command": "set", "data": {"learning_rat": 1}}, 400, "learning_rate"),
        ("", 400, "not JSON"),
        ("nonsense", 400, "not JSON"),
        ("[" * 10_000, 400, "not JSON"),
        ('{"command": "set", "data": {"learning_rate": NaN}}', 400, "NaN is not JSON"),
        ("9" * 5000, 400, "not JSON"),
        (b"\xff\xfe\x00", 400, "not JSON"),
        ("[]", 400, "an object"),
        ('"' + "x" * 70_000 + '"', 413, "65536 bytes"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_reason(
    served: Served, body: Any, status: int, words: str
) -> None:
    answer = served.ask("POST", "/jobs/job/control", body)
    assert (answer.status, words in answer.json["error"]) == (status, True), answer.json
    if words.startswith("Unknown"):
        assert {"graceful_stop", "save_checkpoint", "save_and_stop", "abort", "status"} <= {
            *answer.json["valid_commands"]
        }
    assert served.commands.waiting() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/jobs/job/control", 405),
        ("DELETE", "/jobs/job/status", 405),
        ("OPTIONS", "/jobs/job/control", 405),
        ("POST", "/jobs", 405),
        ("BREW", "/jobs", 405),
        ("GET", "/jobs/another/status", 404),
        ("GET", "/jobs/job", 404),
        ("GET", "/jobs/", 404),
        ("GET", "/jobs/../job/status", 404),
        ("GET", "/jobs/job%2f..%2fjob/status", 404),
        ("GET", "/jobs/job/commands/none", 404),
        ("GET", "/jobs/job/commands/x?wait=nan", 400),
        ("GET", "/jobs/job/commands/x?wait=601", 400),
        ("HEAD", "/jobs/job/status", 200),
        ("HEAD", "/jobs/job/stream", 200),
    ],
)
def test_wrong_methods_and_addresses(served: Served, method: str, path: str, status: int) -> None:
    assert served.ask(method, path).status == status


def test_the_status_shows_what_was_logged_last(served: Served) -> None:
    served.state.global_step, served.state.epoch, served.state.max_steps = 12, 0.5, 100
    served.job.note_log({"loss": 2.0, "grad_norm": float("nan"), "odd": object()}, "train")
    served.job.note_log({"eval_loss": 1.5}, "eval")
    status = served.ask("GET", "/jobs/job/status").json
    known = {"job_id": "job", "status": "running", "global_step": 12, "epoch": 0.5, "max_steps": 100}
    known |= {"loss": 2.0, "grad_norm": "NaN", "odd": "<object>", "eval_loss": 1.5}
    assert {name: status[name] for name in known} == known
    assert served.ask("POST", "/jobs/job/control", {"command": "status"}).json["data"]["global_step"] == 12
    assert served.ask("GET", "/jobs/job/callbacks").json == {"callbacks": [{"key": "A", "class": "A"}]}


def test_a_log_cannot_pass_for_the_jobs_place(served: Served) -> None:
    served.job.note_log({"global_step": 99, "job_id": "other", "status": "fine"}, "train")
    status = served.ask("GET", "/jobs/job/status").json
    assert (status["job_id"], status["status"], status["global_step"]) == ("job", "running", 0)


def test_prometheus_can_read_the_metrics(served: Served) -> None:
    """Read by prometheus_client's own parser."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    served.state.global_step = 12
    served.job.note_log({"loss": 2.0, 'a "b"\n': 1, "inf": float("inf"), "big": 10**400, "text": "x", "on": True}, "x")
    answer = served.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    samples = {
        (sample.name, sample.labels.get("name")): sample.value
        for family in parse(answer.body.decode())
        for sample in family.samples
    }
    assert samples["dalsegno_global_step", None] == 12
    logged = {name: value for (family, name), value in samples.items() if family == "dalsegno_logged"}
    assert logged == {"loss": 2.0, 'a "b"\n': 1.0, "inf": float("inf"), "big": float("inf")}


# -- records ----------------------------------------------------------------------------------------------------------


def steps_of(chunk: Chunk) -> list[int]:
    return [json.loads(record)["global_step"] for record in chunk.records]


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_records_are_read_on_from_any_position(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    log = RecordLog(path, tmp_path)
    log.open()
    feed = LogFile(lambda: path)
    assert feed.after("").records == []
    positions: list[str] = []
    saved = None
    for step in range(1, 6):
        log.append({"global_step": step})
        saved = log.state() if step == 3 else saved
        positions.append(feed.after(positions[-1] if positions else "").position)
    every = feed.after("")
    assert steps_of(every) == [1, 2, 3, 4, 5]
    assert list(every.positions) == positions
    for number, position in enumerate(positions, start=1):
        assert steps_of(feed.after(position)) == list(range(number + 1, 6))
        assert not feed.after(position).is_reset
    log.open(saved)  # a resume from an older checkpoint
    assert feed.after(positions[4]).is_reset
    assert steps_of(feed.after(positions[4])) == [1, 2, 3]
    assert feed.after(positions[2]).records == [] and not feed.after(positions[2]).is_reset
    log.append({"global_step": 40})
    assert feed.after(positions[3]).is_reset
    assert steps_of(feed.after(positions[2])) == [40]
    log.close()


@pytest.mark.parametrize("position", ["x", "9.9", "-1.2.x", "9" * 30, "1.1.x", "0..", "5.9.z", "\x00", "²", "1.²."])
def test_a_position_that_never_was_begins_anew(tmp_path: Path, position: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"global_step": 1}\n')
    for log in (LogFile(lambda: path), MemoryLog()):
        assert log.after(position).is_reset
    assert len(LogFile(lambda: path).after(position).records) == 1


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"global_step": 1}\nnonsense\n{"global_s')
    chunk = LogFile(lambda: path).after("")
    assert steps_of(chunk) == [1]
    path.write_text('{"global_step": 1}\nnonsense\n{"global_step": 2}\n')
    assert steps_of(LogFile(lambda: path).after(chunk.position)) == [2]


def test_a_viewer_gets_the_text_of_the_log_where_any_client_can_read_it(tmp_path: Path) -> None:
    """The process that trains does not encode again what is on disk."""
    as_it_is = ['{"global_step":1,  "loss": 1.50}', '{"loss": 2e0, "note": "\\u00e9\\n", "global_step": 2}']
    other = ['{"global_step": 3, "loss": NaN}', '{"global_step": 4, "loss": "-Infinity"}', '{"é": "NaN"}']
    spelled = ['{"global_step": 3, "loss": "NaN"}', other[1], '{"\\u00e9": "NaN"}']
    damaged = ['{"global_step": 6} {}', '{"global_step": 7, "loss": }', "[8]", "\x00"]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{line}\n" for line in [*damaged, *as_it_is, *other]), encoding="utf-8")
    assert LogFile(lambda: path).after("").records == [*as_it_is, *spelled]
    records = [json.loads(record) for record in [*as_it_is, *spelled]]
    served = Served(tmp_path, log=path)
    try:
        assert served.ask("GET", "/jobs/job/records").json["records"] == records
        stream = Stream(served.port, "/jobs/job/stream", TOKEN)
        assert [content for _, (_, content) in zip(range(5), stream, strict=False)] == [
            *map(json.loads, [*as_it_is, *spelled])
        ]
        stream.close()
    finally:
        served.server.stop()


def test_a_long_log_comes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.control.feed.CHUNK", 100)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"global_step": {step}, "long": "{"x" * step}"}}\n' for step in range(150)))
    served = Served(tmp_path, log=path)
    try:
        steps, position, more = [], "", True
        while more:
            chunk = served.ask("GET", f"/jobs/job/records?since={position}").json
            steps += [record["global_step"] for record in chunk["records"]]
            position, more = chunk["position"], chunk["more"]
        assert steps == list(range(150))
    finally:
        served.server.stop()


def test_a_stream_goes_on_where_it_was_broken_off(served: Served) -> None:
    """Each message once, whichever was the last one seen."""
    for step in range(1, 6):
        served.state.global_step = step
        served.job.note_log({"loss": float(step)}, "train")
        served.job.note_event("save", checkpoint=f"step-{step}")
    first = Stream(served.port, "/jobs/job/stream", TOKEN)
    seen = []
    ids = []
    for message in first:
        seen.append(message)
        ids.append(first.last_id)
        if len(seen) == 10:
            break
    assert [data["loss"] for kind, data in seen if kind == "record"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [data["checkpoint"] for kind, data in seen if kind == "event"] == [f"step-{step}" for step in range(1, 6)]
    first.close()
    served.job.note_log({"loss": 6.0}, "train")
    for number in (1, 4, 5, 7, 9, 10):
        again = Stream(served.port, "/jobs/job/stream", TOKEN, ids[number - 1])
        expected = [*seen[number:], None]
        got = [message for _, message in zip(expected, again, strict=False)]
        again.close()
        losses = [data["loss"] for kind, data in got if kind == "record"]
        assert losses == [*(data["loss"] for kind, data in seen[number:] if kind == "record"), 6.0], number
        assert [data for kind, data in got if kind == "event"] == [
            data for kind, data in seen[number:] if kind == "event"
        ]


def test_a_stream_shows_a_rewind_and_the_end(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"global_step": 1}\n{"global_step": 2}\n')
    served = Served(tmp_path, log=path)
    stream = iter(Stream(served.port, "/jobs/job/stream", TOKEN))
    assert [next(stream)[1]["global_step"] for _ in range(2)] == [1, 2]
    path.write_text('{"global_step": 9}\n')
    assert next(stream) == ("reset", {})
    assert next(stream)[1] == {"global_step": 9}
    path.write_text('{"global_step": 9}\n{"global_step": 10}\n')
    served.job.note_event("train_end", reason="finished")
    served.server.stop()
    rest = list(stream)
    assert ("record", {"global_step": 10}) in rest
    assert [data["event"] for kind, data in rest if kind == "event"] == ["train_end"]
    assert rest[-1] == ("end", {})


def test_streams_are_counted_and_a_closed_one_makes_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.control.api.MOST_STREAMS", 2)
    streams = [Stream(served.port, "/jobs/job/stream", TOKEN) for _ in range(2)]
    assert served.ask("GET", "/jobs/job/stream").status == 429
    streams[0].close()  # in the middle
    wait_until(lambda: served.ask("HEAD", "/jobs/job/stream").status == 200)
    wait_until(lambda: can_stream(served.port))
    streams[1].close()


def test_no_more_streams_than_that_also_if_they_are_asked_for_at_once(served: Served) -> None:
    request = f"GET /jobs/job/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    streams = [connect(served.port, request.encode()) for _ in range(40)]
    statuses = [raw.recv(12) for raw in streams]
    assert statuses.count(b"HTTP/1.1 200") == MOST_STREAMS
    assert statuses.count(b"HTTP/1.1 429") == 40 - MOST_STREAMS
    for raw in streams:
        raw.close()


def can_stream(port: int) -> bool:
    try:
        Stream(port, "/jobs/job/stream", TOKEN).close()
    except AssertionError:
        return False
    return True


# -- who may ask -------------------------------------------------------------------------------------------------------

ADDRESSES = [
    ("GET", "/jobs"), ("GET", "/jobs/job/status"), ("POST", "/jobs/job/control"), ("GET", "/jobs/job/records"),
    ("GET", "/jobs/job/stream"), ("GET", "/jobs/job/callbacks"), ("GET", "/jobs/job/commands/x"), ("GET", "/metrics"),
    ("GET", "/nothing"), ("PUT", "/jobs"), ("GET", "//"), ("GET", "/?token=" + TOKEN[:8] + "x/../jobs"),
]  # fmt: skip
CREDENTIALS = [
    None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}x", TOKEN,
    f"Basic {TOKEN}", f"Bearer {TOKEN[::-1]}", "Bearer \xff", f"Bearer {TOKEN},{TOKEN}",
]  # fmt: skip


@pytest.mark.parametrize("credentials", CREDENTIALS)
def test_without_the_token_nothing_is_answered_and_nothing_done(served: Served, credentials: str | None) -> None:
    headers = {} if credentials is None else {"Authorization": credentials}
    for method, path in ADDRESSES[:-1]:
        answer = served.ask(method, path, {"command": "abort"}, token=None, headers=headers)
        assert (answer.status, answer.json["error"]) == (401, "authentication required"), path
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert served.commands.waiting() == []


def test_a_token_in_the_address_does_not_count(served: Served) -> None:
    assert served.ask("GET", f"/jobs/job/status?token={TOKEN}&access_token={TOKEN}", token=None).status == 401


def test_two_tokens_are_none(served: Served) -> None:
    request = f"GET /jobs HTTP/1.1\r\nHost: x\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with connect(served.port, request.encode()) as raw:
        assert b" 400 " in raw.recv(1000) or b" 421 " in raw.recv(1000)
    doubled = f"GET /jobs HTTP/1.0\r\nHost: localhost\r\n{f'Authorization: Bearer {TOKEN}' + chr(13) + chr(10)}"
    with connect(served.port, (doubled + f"Authorization: Bearer {TOKEN}\r\n\r\n").encode()) as raw:
        assert b" 401 " in raw.recv(1000)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost:8900", True),
        ("127.0.0.1", True),
        ("[::1]:1", True),
        ("LOCALHOST", True),
        (socket.gethostname(), True),
        ("evil.example", False),
        ("localhost.evil.example:8900", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("evil.example@127.0.0.1", False),
    ],
)
def test_a_name_that_is_not_this_servers_is_refused(served: Served, host: str, is_known: bool) -> None:
    """DNS rebinding: a page at evil.example, whose name leads here, sends its own name. Also with the token."""
    answer = served.ask("POST", "/jobs/job/control", {"command": "log"}, headers={"Host": host})
    assert (answer.status == 200) is is_known
    assert len(served.commands.waiting()) == is_known


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost"])
def test_another_web_page_cannot_command_a_server_without_a_token(tmp_path: Path, origin: str) -> None:
    served = Served(tmp_path, token=None)
    try:
        body = {"command": "abort"}
        answer = served.ask("POST", "/jobs/job/control", body, token=None, headers={"Origin": origin})
        assert answer.status == 403
        assert served.commands.waiting() == []
        own = {"Origin": f"http://localhost:{served.port}", "Host": f"localhost:{served.port}"}
        assert served.ask("POST", "/jobs/job/control", body, token=None, headers=own).status == 200
    finally:
        served.server.stop()


def test_access_that_cannot_be_meant_is_refused() -> None:
    for host in ("0.0.0.0", "::", "node-7", "10.0.0.1"):
        with pytest.raises(ConfigurationError, match="disable_auth=True with host="):
            check_access(host, None, True)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        check_access("127.0.0.1", "x" * 32, True)
    for token in ("short", "with blanks in between", "x\r\n" * 10, "ä" * 20):
        with pytest.raises(ConfigurationError, match="at least 16") as caught:
            check_access("127.0.0.1", token, False)
        assert token not in str(caught.value)
    check_access("127.0.0.5", None, True)
    check_access("0.0.0.0", None, False)


# -- clients that misbehave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(request_timeout=0.3)])
def test_a_slow_request_is_cut_off(served: Served) -> None:
    head = f"POST /jobs/job/control HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    slow = ["", "GET", head, f"{head}Content-Length: 50\r\n\r\n{{", f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\nab"]
    waiting = [connect(served.port, begin.encode()) for begin in slow]
    for begin, raw in zip(slow, waiting, strict=True):
        with raw:
            assert is_closed_by_peer(raw), begin
    assert served.commands.waiting() == []


@pytest.mark.parametrize("limits", [Limits(connections=8)])
def test_slow_clients_do_not_keep_others_out(served: Served) -> None:
    """More of them than there are places, each in the middle of its request: a new client is answered at once."""
    slow = [connect(served.port, b"GET /jobs HTTP/1.1\r\nHost: local") for _ in range(20)]
    assert served.ask("GET", "/jobs/job/status").status == 200
    open_ones = served.server._connections
    wait_until(lambda: open_ones is not None and len(open_ones.sockets()) <= 8)
    for raw in slow:
        raw.close()


@pytest.mark.parametrize("limits", [Limits(connections=2)])
def test_clients_that_are_being_answered_are_not_driven_out(served: Served) -> None:
    streams = [Stream(served.port, "/jobs/job/stream", TOKEN) for _ in range(2)]
    with connect(served.port) as raw:
        assert is_closed_by_peer(raw)
    served.job.note_event("save")
    assert [next(iter(stream))[1]["event"] for stream in streams] == ["save", "save"]
    for stream in streams:
        stream.close()
    wait_until(lambda: answers(served))


@pytest.mark.parametrize("limits", [Limits(connections=2, refusal_pause=60.0)])
@pytest.mark.parametrize("headers", ["Host: localhost", "Host: evil.example", "Host: localhost\r\nOrigin: http://evil"])
def test_refusals_wait_and_hold_no_place(served: Served, headers: str) -> None:
    request = f"GET /jobs HTTP/1.1\r\n{headers}\r\n\r\n".encode()
    refused = [connect(served.port, request) for _ in range(2)]
    for _ in range(3):
        assert served.ask("GET", "/jobs/job/status").status == 200
    for raw in refused:
        raw.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            assert raw.recv(1) == b""
        raw.close()


def answers(served: Served) -> bool:
    try:
        return served.ask("GET", "/jobs/job/status").status == 200
    except OSError:
        return False


@pytest.mark.parametrize("limits", [Limits(write_timeout=0.3)])
def test_a_client_that_does_not_read_is_cut_off(served: Served) -> None:
    """Its answer stays in bounded buffers, and its place becomes free."""
    for _ in range(3000):
        served.job.note_log({"text": "x" * 5000}, "train")
    request = f"GET /jobs/job/records HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", served.port))
    open_ones = wait_until(lambda: served.server._connections)
    wait_until(lambda: open_ones.sockets())
    raw.sendall(request.encode())
    wait_until(lambda: not open_ones.sockets())
    assert is_closed_by_peer(raw)
    raw.close()


def test_a_client_that_reads_slowly_but_steadily_gets_its_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that for 64 KiB, not for the answer, which may be long. The server's clock goes by what is read."""
    body = bytes(1 << 22)
    now, looks = time.monotonic(), 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    monkeypatch.setattr(connections, "monotonic", clock)
    monkeypatch.setattr(connections, "_SWEEP", 0.001)
    listener = listen("127.0.0.1", None)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    limits = Limits(request_timeout=1.0, write_timeout=1.0)
    thread = ServerThread(listener, lambda stopping: Response(body), name="slow", tls=None, limits=limits)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    raw.settimeout(60)
    raw.connect(listener.getsockname())
    thread.start()
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    received = 0
    with contextlib.suppress(ConnectionError):
        while received < len(body) and (piece := raw.recv(1 << 16)):
            received += len(piece)
            now, seen = now + 0.04, looks
            wait_until(lambda seen=seen: looks > seen + 1)
    assert received >= len(body)
    raw.close()
    thread.stop()


@pytest.mark.parametrize("limits", [Limits(connections=4)])
def test_clients_that_do_not_read_do_not_keep_others_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places, each asking again and again: a new client gets the place of one of them."""
    for _ in range(200):
        served.job.note_log({"text": "x" * 5000}, "train")
    asked: list[str] = []
    after = served.job.records.after
    monkeypatch.setattr(served.job.records, "after", lambda position: asked.append(position) or after(position))
    request = f"GET /jobs/job/records HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    greedy = [connect(served.port, 40 * request) for _ in range(4)]
    counts: list[int] = []

    def is_stuck() -> bool:
        counts.append(len(asked))
        return len(counts) > 30 and counts[-1] == counts[-30] >= len(greedy)

    wait_until(is_stuck)
    assert len(asked) < 40 * len(greedy)
    assert served.ask("GET", "/jobs/job/status").status == 200
    for raw in greedy:
        raw.close()


@pytest.mark.parametrize("count, status", [(160, 200), (165, 431), (600, 431)])
def test_a_request_s_line_and_headers_are_bounded_however_they_are_spread(
    served: Served, count: int, status: int
) -> None:
    """16 KiB, of which the names, values and addresses are a part; also where they arrive at once."""
    assert served.ask("GET", "/jobs", headers={f"X-{number:03}": "y" * 91 for number in range(count)}).status == status
    assert served.ask("GET", "/jobs?" + "y" * 100 * count).status == status
    assert served.ask("GET", "/" + "y" * 100 * count).status == (404 if status == 200 else 431)


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /" + "x" * 20_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /jobs HTTP/1.1\r\nHost: localhost\r\n" + "".join(f"X-{n}: {'y' * 100}\r\n" for n in range(500)) + "\r\n",
        "GET /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /jobs HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /jobs HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_no_nonsense_is_a_failure_of_the_server(served: Served, request_line: str) -> None:
    with connect(served.port, request_line.encode("latin-1")) as raw:
        raw.shutdown(socket.SHUT_WR)
        answer = raw.recv(1 << 16)
    assert b" 5" not in answer.split(b"\r\n")[0]
    assert served.ask("GET", "/jobs/job/status").status == 200


# -- its life --------------------------------------------------------------------------------------------------------


def test_other_servers_of_the_process_log_as_before(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn's loggers are the process's: the job's server writes nothing to them, and leaves them as they are."""
    errors, access = logging.getLogger("uvicorn.error"), logging.getLogger("uvicorn.access")
    assert access.propagate
    with caplog.at_level(logging.INFO):
        assert served.ask("GET", "/jobs/job/status").status == 200
        with socket.create_connection(("127.0.0.1", served.port)) as nonsense:
            nonsense.sendall(b"nonsense\r\n\r\n")
            assert is_closed_by_peer(nonsense)
        errors.warning("of another server")
        access.info("a request to another server")
    assert caplog.messages == ["of another server", "a request to another server"]


def test_two_jobs_at_once_never_get_the_same_port() -> None:
    """Also if they begin at the same moment: the port is taken when it is chosen."""
    found = []
    starting = threading.Barrier(8)

    def begin() -> None:
        starting.wait()
        found.append(listen("127.0.0.1", None))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = [each.getsockname()[1] for each in found]
    assert len(set(ports)) == 8
    assert set(ports) <= set(server.PORTS)
    with pytest.raises(OSError, match=f"127.0.0.1, port {ports[0]}: .*in use"):
        listen("127.0.0.1", ports[0])
    for each in found:
        each.close()


def test_all_ports_taken_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    monkeypatch.setattr(server, "PORTS", range(port, port + 1))
    with pytest.raises(OSError, match=f"ports {port} to {port} are all in use"):
        listen("127.0.0.1", None)
    taken.close()


def test_the_end_waits_for_no_client(tmp_path: Path) -> None:
    """Neither for one that waits for a command, nor for a stream that is not read, nor for half a request."""
    served = Served(tmp_path)
    got = []
    waiting = threading.Thread(
        target=lambda: got.append(served.ask("POST", "/jobs/job/control?wait=600", {"command": "log"}))
    )
    waiting.start()
    stream = Stream(served.port, "/jobs/job/stream", TOKEN)
    half = connect(served.port, b"GET /jobs")
    wait_until(served.commands.waiting)
    served.server.stop()
    assert not served.server._thread.is_alive()
    waiting.join()
    assert (got[0].status, got[0].json["step"]) == (200, None)
    assert list(stream)[-1] == ("end", {})
    assert is_closed_by_peer(half)
    half.close()
    with pytest.raises(ConnectionRefusedError):
        connect(served.port)


def test_a_server_that_breaks_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_(self: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(uvicorn.Server, "main_loop", break_)
    served = Served(tmp_path)
    wait_until(lambda: not served.server._thread.is_alive())
    assert [repr(error) for error in served.failures] == ["MemoryError('no more')"]
    served.server.stop()
    served.commands.submit("log", by="test")


def test_a_forked_process_answers_nobody_and_holds_nothing(tmp_path: Path) -> None:
    """As a data loader's worker, which outlives the server: the port is free at once, and clients see the end."""
    served = Served(tmp_path)
    stream = Stream(served.port, "/jobs/job/stream", TOKEN)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    os.close(read)
    try:
        assert all(served.ask("GET", "/jobs/job/status").status == 200 for _ in range(10))
        served.server.stop()
        assert list(stream)[-1] == ("end", {})
        with pytest.raises(ConnectionRefusedError):
            connect(served.port)
        listen("127.0.0.1", served.port).close()
    finally:
        os.close(write)
        os.waitpid(child, 0)


# -- TLS -------------------------------------------------------------------------------------------------------------


def test_a_client_trusts_exactly_the_jobs_certificate(
    tmp_path: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from dalsegno.control.client import JobClient
    from dalsegno.errors import NotRunning

    served = Served(tmp_path, tls=tls_context(*certificate), host="0.0.0.0")
    url = f"https://127.0.0.1:{served.port}"
    try:
        with JobClient(url, "job", token=TOKEN, certificate=certificate[0].read_text()) as client:
            assert client.status()["job_id"] == "job"
        with JobClient(url, "job", token=TOKEN) as client, pytest.raises(NotRunning, match="certificate"):
            client.status()
        with connect(served.port, b"GET /jobs HTTP/1.1\r\n\r\n") as raw:  # not TLS
            assert is_closed_by_peer(raw)
    finally:
        served.server.stop()


def test_a_tls_handshake_that_never_ends_keeps_nobody_out(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dalsegno.control.client import JobClient

    monkeypatch.setattr(server, "DEFAULT_LIMITS", Limits(connections=4))
    served = Served(tmp_path, tls=tls_context(*certificate))
    silent = [connect(served.port) for _ in range(10)]
    url = f"https://127.0.0.1:{served.port}"
    with JobClient(url, "job", token=TOKEN, certificate=certificate[0].read_text()) as client:
        assert client.status()["job_id"] == "job"
        held = served.server._connections
        assert held is not None
        wait_until(lambda: len(held.sockets()) <= 4 + 1)  # the client's is not in a handshake
    assert sum(is_closed_by_peer(raw) for raw in silent[:6]) == 6, "the oldest give way"
    served.server.stop()
    assert not served.server._thread.is_alive()
    for raw in silent:
        raw.close()


def test_a_key_that_does_not_fit_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("no key")
    with pytest.raises(ConfigurationError, match="certfile="):
        tls_context(certificate[0], tmp_path / "other.pem")
    with pytest.raises(ConfigurationError, match="certfile="):
        tls_context(tmp_path / "missing.pem", certificate[1])
