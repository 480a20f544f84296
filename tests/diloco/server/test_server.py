"""The server, and workers that do not keep to its rules: each is refused with the reason; others are not affected."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from control.talking import wait_until
from dalsegno.diloco import DiLoCoClient, DiLoCoServer, DiLoCoWorker, WorkerOptions, nesterov
from dalsegno.diloco.server.api import build_app
from dalsegno.diloco.server.files import PIECE, Bell, Growth, Scratch
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.messages import (
    FrameLayout,
    FrameReader,
    Settings,
    Submission,
    bytes_of,
    frame_pieces,
    in_file_order,
)
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.errors import ConfigurationError, Locked, NotFound, NotRunning, StateMismatch
from dalsegno.system import filesystem
from dalsegno.web.security import trusting
from diloco.scenes import SPECS, Line, all_together, rules, submission_of, values

SETTINGS = Settings([spec.to_json() for spec in SPECS], 1)


@dataclasses.dataclass
class Scene:
    """A server, and two workers who have joined it at version 0."""

    server: DiLoCoServer
    clients: list[DiLoCoClient]

    def submit(self, worker: int, submission: Submission, specs: Specs = SPECS, **changed: torch.Tensor) -> None:
        tensors = values(specs, 1) | changed
        self.clients[worker].submit(submission, specs, [tensors[spec.name] for spec in in_file_order(specs)])

    def put(self, path: str, body: bytes, length: int | None = None, **headers: str) -> tuple[int, str]:
        """A request of a worker's own making: status and reason."""
        host, port = self.server._bound or ("", 0)
        connection = http.client.HTTPConnection(host, port, timeout=60)
        given = {
            "Authorization": f"Bearer {self.server.token}",
            "Content-Length": str(len(body) if length is None else length),
        }
        connection.request("PUT", path, body, given | headers)
        answer = connection.getresponse()
        text = json.loads(answer.read())["error"] if answer.status != 200 else ""
        connection.close()
        return answer.status, text

    @property
    def version(self) -> int:
        return int(self.clients[0].status()["version"])

    def finish_round(self) -> None:
        """Both submit what is right; the round continues unaffected."""
        for number, client in enumerate(self.clients):
            submission = submission_of(f"w{number}", 1, 0)
            if client.offer(submission):
                self.submit(number, submission)
        assert [client.result(f"w{number}", 1, wait=60) is not None for number, client in enumerate(self.clients)]
        assert self.version == 1


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with DiLoCoServer(tmp_path, 2, rules=rules(2)) as server:
        clients = [DiLoCoClient(server.address, token=server.token) for _ in range(2)]
        clients[0].register("w0", SETTINGS, count=None, run_id=None, dylu=False)
        tensors = values(SPECS, 0)
        clients[0].initialize("w0", SPECS, [tensors[spec.name] for spec in in_file_order(SPECS)])
        for number, client in enumerate(clients):
            answer = client.register(f"w{number}", SETTINGS, count=None, run_id=None, dylu=False)
            assert answer["adopt"] == 0
        yield Scene(server, clients)
        for client in clients:
            client.close()


def frame(head: dict[str, Any], specs: Specs, tensors: dict[str, torch.Tensor]) -> bytes:
    ordered = [tensors[spec.name] for spec in in_file_order(specs)]
    return b"".join(frame_pieces(FrameLayout(head, specs), bytes_of(ordered)))


def test_nan_is_refused(scene: Scene) -> None:
    bad = torch.zeros(4, 3)
    bad[1, 2] = float("nan")
    submission = submission_of("w0", 1, 0)
    assert scene.clients[0].offer(submission)
    with pytest.raises(ConfigurationError, match=r"layer.weight contains NaN or infinity; nothing of this"):
        scene.submit(0, submission, **{"layer.weight": bad})
    scene.finish_round()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"number": 2}, "not the next one; 0 was accepted last"),
        ({"base": 1}, "relative to version 1; the worker was given 0"),
        ({"fragment": 1}, "no fragment 1"),
        ({"worker_id": "w9"}, "w9 has not joined this run"),
    ],
)
def test_a_submission_out_of_turn_is_refused(scene: Scene, other: dict[str, Any], message: str) -> None:
    with pytest.raises((StateMismatch, NotFound), match=message):
        scene.clients[0].offer(dataclasses.replace(submission_of("w0", 1, 0), **other))
    scene.finish_round()


@pytest.mark.parametrize(
    "other",
    [
        {"samples": 0},
        {"samples": -3},
        {"samples": 1.5},
        {"loss": float("nan")},
        {"worker_id": "../w0"},
        {"seconds": -1.0},
        {"seconds": 5e-324},
        {"steps": 10**400},
        {"samples": 2**62},
        {"loss": 1e308},
    ],
)
def test_a_description_that_cannot_be_is_refused(scene: Scene, other: dict[str, Any]) -> None:
    body = json.dumps({**dataclasses.asdict(submission_of("w0", 1, 0)), **other}).encode()
    connection = http.client.HTTPConnection(*(scene.server._bound or ()), timeout=60)
    connection.request("POST", "/submissions", body, {"Authorization": f"Bearer {scene.server.token}"})
    assert connection.getresponse().status == 400
    connection.close()
    scene.finish_round()


def test_an_old_round_is_refused_and_a_replayed_submission_counts_once(scene: Scene) -> None:
    scene.finish_round()
    before = scene.clients[0].status()
    assert not scene.clients[0].offer(submission_of("w0", 1, 0))  # the server has it
    assert scene.put("/submissions/w0/1", b"")[0] in (400, 409)
    with pytest.raises(StateMismatch, match="relative to version 0; the worker was given 1"):
        scene.clients[0].offer(submission_of("w0", 2, 0))
    after = scene.clients[0].status()
    assert (after["version"], after["bytes_received"]) == (before["version"], before["bytes_received"])


def test_bodies_of_another_size_are_refused_before_they_are_read(scene: Scene) -> None:
    """A header alone is enough for the answer: the body never comes."""
    submission = submission_of("w0", 1, 0)
    assert scene.clients[0].offer(submission)
    status, reason = scene.put("/submissions/w0/1", b"", length=1 << 40)
    assert (status, "Content-Length" in reason) == (400, True)
    status, reason = scene.put("/submissions/w0/1", b"", length=100)
    assert (status, "Content-Length" in reason) == (400, True)
    scene.finish_round()


def test_other_names_in_a_body_of_the_right_size(scene: Scene) -> None:
    submission = submission_of("w0", 1, 0)
    assert scene.clients[0].offer(submission)
    others = tuple(TensorSpec(spec.name.replace("layer", "lawyer"[:5]), spec.dtype, spec.shape) for spec in SPECS)
    body = frame(dataclasses.asdict(submission), others, values(others, 1))
    status, reason = scene.put("/submissions/w0/1", body)
    assert (status, "the frame has other tensors" in reason) == (400, True)
    scene.finish_round()


def test_a_head_that_describes_another_submission(scene: Scene) -> None:
    submission = submission_of("w0", 1, 0)
    assert scene.clients[0].offer(submission)
    body = frame({**dataclasses.asdict(submission), "samples": 1 << 40}, SPECS, values(SPECS, 1))
    status, reason = scene.put("/submissions/w0/1", body)
    assert (status, "describes another submission" in reason) == (400, True)
    scene.finish_round()


def test_a_connection_that_is_cut_in_mid_body(scene: Scene, tmp_path: Path) -> None:
    submission = submission_of("w0", 1, 0)
    body = frame(dataclasses.asdict(submission), SPECS, values(SPECS, 1))
    for cut in (1, 30, len(body) // 2, len(body) - 1):
        assert scene.clients[0].offer(submission)
        with socket.create_connection(scene.server._bound or ("", 0)) as connection:
            head = (
                f"PUT /submissions/w0/1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {scene.server.token}\r\n"
            )
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
    assert scene.version == 0
    scene.finish_round()


def test_a_worker_that_stops_in_mid_body_holds_up_no_round(scene: Scene) -> None:
    """Not even its own, which it may send again on another connection."""
    submission = submission_of("w0", 1, 0)
    body = frame(dataclasses.asdict(submission), SPECS, values(SPECS, 1))
    assert scene.clients[0].offer(submission)
    with socket.create_connection(scene.server._bound or ("", 0)) as connection:
        head = f"PUT /submissions/w0/1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {scene.server.token}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
        scene.finish_round()
        connection.sendall(body[len(body) // 2 :])  # late: it was accepted already, and counts once
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert scene.version == 1


@pytest.mark.parametrize("encrypted", [False, True])
def test_bodies_of_several_buffers(tmp_path: Path, certificate: tuple[Path, Path], encrypted: bool) -> None:
    """As large as several pieces, and connections that are cut in the midst of them; the parameters
    come back as they were sent."""
    specs = (TensorSpec("w", torch.float32, (5 * PIECE // 8,)), TensorSpec("b", torch.float32, (3,)))
    settings = Settings([spec.to_json() for spec in specs], 1)
    sent = values(specs, 0)
    files = dict(zip(("certfile", "keyfile"), certificate, strict=True)) if encrypted else {}
    trusted = certificate[0].read_text() if encrypted else None
    with (
        DiLoCoServer(tmp_path, 1, rules=rules(1), **files) as server,
        DiLoCoClient(server.address, token=server.token, certificate=trusted) as client,
    ):

        def begin(request: str, length: int = 0) -> socket.socket:
            connection = socket.create_connection(server._bound or ("", 0))
            if trusted is not None:
                connection = trusting(trusted).wrap_socket(connection)
            head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {length}\r\n"
            connection.sendall(f"{request} HTTP/1.1\r\n{head}\r\n".encode())
            return connection

        assert client.register("w0", settings, count=None, run_id=None, dylu=False)["needs_parameters"]
        body = frame({}, specs, sent)
        with begin("PUT /parameters/w0", len(body)) as connection:
            connection.sendall(body[: len(body) // 2])
        client.initialize("w0", specs, [sent[spec.name] for spec in in_file_order(specs)])
        answer = client.register("w0", settings, count=None, run_id=None, dylu=False)
        result = client.result("w0", answer["adopt"])
        assert result is not None
        with begin("GET /parameters/0") as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
        with begin("HEAD /parameters/0") as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
        fetched = {spec.name: torch.empty(spec.shape) for spec in specs}
        for _ in range(2):  # on one connection
            client.fetch(result, specs, lambda reader: [reader.tensor(fetched[spec.name]) for spec in reader.order])
        assert all(torch.equal(fetched[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([SPECS[0]], "does not train layer.bias"),
        ([SPECS[0], dataclasses.replace(SPECS[1], shape=(5,))], r"layer.bias is float32 \[5\] in the worker"),
        ([*SPECS, TensorSpec("extra", torch.float32, (1,))], "trains extra, which this run does not"),
        ([SPECS[1], SPECS[0]], "in another order"),
    ],
)
def test_another_model_is_refused(scene: Scene, tensors: list[TensorSpec], message: str) -> None:
    other = Settings([spec.to_json() for spec in tensors], 1)
    with pytest.raises(StateMismatch, match=message):
        scene.clients[1].register("w2", other, count=None, run_id=None, dylu=False)
    scene.finish_round()


def test_no_token_no_answer(scene: Scene) -> None:
    for token in (None, "0" * 64):
        with (
            DiLoCoClient(scene.server.address, token=token) as client,
            pytest.raises(ConfigurationError, match="token"),
        ):
            client.status()
    assert scene.server.token_file.stat().st_mode & 0o777 == 0o600
    scene.finish_round()


@pytest.mark.parametrize(("bound", "status"), [("0.0.0.0", 200), ("127.0.0.1", 421)])
def test_a_server_for_other_machines_may_have_any_name(tmp_path: Path, bound: str, status: int) -> None:
    """Such as an alias in the network's DNS. One for this machine must not: a web page could name itself like it."""
    with DiLoCoServer(tmp_path, 1, host=bound) as server:
        port = int(server.address.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Host": "outer.example:8512", "Authorization": f"Bearer {server.token}"}
        connection.request("GET", "/status", headers=headers)
        assert connection.getresponse().status == status
        connection.close()


def test_a_round_goes_on_without_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is silent is not waited for; when it is back, what it did in the old round is refused, and it
    continues with the global parameters."""
    now = 0.0
    monkeypatch.setattr("dalsegno.diloco.server.rounds.time", SimpleNamespace(monotonic=lambda: now))
    with DiLoCoServer(tmp_path, 2, rules=rules(2, heartbeat_timeout=500.0)) as server:
        workers = []
        for number, interval in enumerate((0.05, 10_000.0)):
            options = WorkerOptions(
                server.address, token=server.token, worker_id=f"w{number}", heartbeat_interval=interval
            )
            workers.append(DiLoCoWorker(Line(), options))
            workers[-1].join()
        now = 1000.0
        with DiLoCoClient(server.address, token=server.token) as client:
            wait_until(lambda: [each["seen_seconds_ago"] for each in client.status()["workers"]] == [0, 1000])
        workers[0].count_step(8)
        assert workers[0].synchronize().version == 1  # as soon as the other one is known to be dead
        workers[0].leave()  # otherwise the other one would wait for the end of the next round
        workers[1].count_step(8)
        done = workers[1].synchronize()
        assert (done.dropped, done.version) == (True, 1)
        assert torch.equal(workers[1].snapshot.tensors["first"], workers[0].snapshot.tensors["first"])
        workers[1].leave()


def test_a_worker_that_comes_later_begins_with_the_next_round(scene: Scene) -> None:
    answer = scene.clients[1].register("w2", SETTINGS, count=None, run_id=None, dylu=False)
    assert answer["adopt"] == 0
    assert scene.clients[1].result("w2", 0) is None  # it waits
    scene.finish_round()
    result = scene.clients[1].result("w2", 0)
    assert result is not None and result.version == 1
    with pytest.raises(StateMismatch):
        scene.clients[1].offer(submission_of("w2", 1, 0))
    assert scene.clients[1].offer(submission_of("w2", 1, 1))


def test_a_round_does_not_wait_for_a_worker_that_has_left(scene: Scene) -> None:
    scene.clients[1].deregister("w1")
    submission = submission_of("w0", 1, 0)
    assert scene.clients[0].offer(submission)
    scene.submit(0, submission)
    assert scene.clients[0].result("w0", 1, wait=60) is not None


def test_min_workers_holds(tmp_path: Path) -> None:
    with DiLoCoServer(tmp_path, 2, rules=rules(2, min_workers=2)) as server:
        workers = []
        for number in range(2):
            workers.append(
                DiLoCoWorker(Line(), WorkerOptions(server.address, token=server.token, worker_id=f"w{number}"))
            )
            workers[-1].join()
        workers[1].leave()
        submission = workers[0]._next_submission(None, 1.0)
        with DiLoCoClient(server.address, token=server.token) as client:
            assert client.offer(submission)
            assert workers[0]._exchange.submit(submission).value == "done"
            assert client.result("w0", 1) is None
            assert client.status()["version"] == 0
        workers[0].leave()


class Stop:
    """Stops the threads that come to an operation on a file, until :meth:`go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str, part: str, *, after: int = 0) -> None:
        """``part``: of the file's path. ``after``: such operations that are let through before."""
        self.reached, self._gone = threading.Event(), threading.Event()
        self._what, self._part, self._left = what, part, after
        monkeypatch.setattr(filesystem, "watcher", self._watch)

    def _watch(self, what: str, path: Path) -> None:
        if what == self._what and self._part in str(path) and not self._gone.is_set():
            self._left -= 1
            if self._left < 0:
                self.reached.set()
                assert self._gone.wait(60)

    def go(self) -> None:
        self._gone.set()


def test_a_checkpoint_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written, the round that it is of is fetched, and submissions of the next one are accepted. They are
    not lost: the next server has them, in the journal that the checkpoint has shortened."""
    with DiLoCoServer(tmp_path, 2, rules=rules(2, save_every=1)) as server:
        workers = [
            DiLoCoWorker(Line(seed=0), WorkerOptions(server.address, token=server.token, worker_id=f"w{number}"))
            for number in range(2)
        ]
        for worker in workers:
            worker.join()
        stop = Stop(monkeypatch, "rename", "checkpoints")
        all_together([partial(_one_round, worker) for worker in workers])
        assert stop.reached.wait(60)
        submission = workers[0]._next_submission(None, 1.0)
        with DiLoCoClient(server.address, token=server.token) as client:
            assert client.status()["version"] == 1
            assert client.offer(submission)
            assert workers[0]._exchange.submit(submission).value == "done"
            stop.go()
    for worker in workers:
        worker.leave()
    assert (tmp_path / "checkpoints/step-00000001").exists()
    again = OuterRun(tmp_path, nesterov(), 1)
    assert again.state.version == 1
    assert again.state.pending(["w0", "w1"]) == [submission]
    assert not again.tensors(submission).block("first", 0, 30, Scratch()).any()
    again.close(save=False)


def _one_round(worker: DiLoCoWorker) -> None:
    worker.count_step(8)
    done = worker.synchronize()
    assert done is not None and done.version == 1


def test_no_result_before_it_is_on_disk(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer step is done meanwhile; neither worker is answered."""
    stop = Stop(monkeypatch, "fsync", "journal")
    answered: list[int] = []

    def submit(number: int) -> None:
        submission = submission_of(f"w{number}", 1, 0)
        assert scene.clients[number].offer(submission)
        scene.submit(number, submission)
        answered.append(number)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    assert stop.reached.wait(60)
    with DiLoCoClient(scene.server.address, token=scene.server.token) as client:
        while client.status()["version"] < 1:
            pass
        with pytest.raises(NotRunning):  # neither is this, which would report the submission as accepted
            impatient = DiLoCoClient(scene.server.address, token=scene.server.token, timeout=0.2)
            impatient.offer(submission_of("w0", 1, 0))
        assert client.result("w0", 1) is None
    assert not answered
    stop.go()
    for thread in threads:
        thread.join()
    assert sorted(answered) == [0, 1]
    assert all(client.result(f"w{number}", 1, wait=60) for number, client in enumerate(scene.clients))


@pytest.mark.parametrize("encrypted", [False, True])
def test_parameters_are_fetched_while_they_are_written(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    specs = (TensorSpec("w", torch.float32, (1 << 20,)),)
    settings = Settings([spec.to_json() for spec in specs], 1)
    files = dict(zip(("certfile", "keyfile"), certificate, strict=True)) if encrypted else {}
    trusted = certificate[0].read_text() if encrypted else None
    with (
        DiLoCoServer(tmp_path, 1, nesterov(1.0, 0.0), rules(1), **files) as server,
        DiLoCoClient(server.address, token=server.token, certificate=trusted) as client,
    ):
        assert client.register("w0", settings, count=None, run_id=None, dylu=False)["needs_parameters"]
        client.initialize("w0", specs, [torch.zeros(1 << 20)])
        client.register("w0", settings, count=None, run_id=None, dylu=False)
        stop = Stop(monkeypatch, "write", "versions", after=4)  # its head, and two of four blocks
        submission = submission_of("w0", 1, 0)
        assert client.offer(submission)
        client.submit(submission, specs, [torch.ones(1 << 20)])
        result = client.result("w0", 1, wait=60)
        assert result is not None
        fetched, pieces = torch.zeros(1 << 20), 0

        def take(reader: FrameReader) -> None:
            nonlocal pieces
            memory = fetched.view(torch.uint8).numpy().data
            for begin in range(0, len(memory), 1 << 20):
                if begin == 2 << 20:
                    assert stop.reached.wait(60)  # and what has arrived was written before
                    stop.go()
                reader.fill(memory[begin : begin + (1 << 20)])
                pieces += 1

        client.fetch(result, specs, take)
        assert (pieces, fetched.unique().tolist()) == (4, [-1.0])


def test_one_server_per_folder(scene: Scene) -> None:
    with pytest.raises(Locked):
        DiLoCoServer(scene.server.folder, 2).start()


def test_a_client_finds_no_dalsegno_server() -> None:
    with pytest.raises(ConfigurationError, match="needs HOST:PORT"):
        DiLoCoClient("outer.example")
    with pytest.raises(NotRunning, match="refused"):
        DiLoCoClient("127.0.0.1:9").status()


def test_the_rest_of_the_parameters_is_not_read_for_a_client_that_is_gone(tmp_path: Path) -> None:
    length, sent = 1 << 24, 0
    (tmp_path / "parameters").write_bytes(bytes(length))
    file = FileIO(tmp_path / "parameters")

    class OneFile:
        def parameters(self, version: int, fragment: int | None) -> tuple[FileIO, Growth]:
            return file, Growth(length, length)

    async def receive() -> Any:
        return {"type": "http.disconnect" if sent else "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def ask() -> None:
        app = build_app(cast(Any, OneFile()), Bell(), asyncio.Event(), host="127.0.0.1", token=None)
        place = {"type": "http", "method": "GET", "path": "/parameters/1", "query_string": b"", "scheme": "http"}
        await app({**place, "headers": [(b"host", b"127.0.0.1")]}, receive, send)

    asyncio.run(ask())
    assert 0 < sent < length
    assert file.closed
