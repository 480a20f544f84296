"""Clients for the tests: one that knows only what FIELD's clients know, and raw sockets."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def wait_until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what it returns, once that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.01)
    return found


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        content = json.dumps(body) if isinstance(body, dict) else body
        credentials = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, content, {**credentials, **(headers or {})})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()})
    finally:
        connection.close()


class OldClient:
    """Speaks the API that was there before, and nothing else: finds a job by its files, asks it, and commands it."""

    def __init__(self, jobs: Path | None = None) -> None:
        self.jobs = jobs or Path(os.environ["XDG_STATE_HOME"]) / "dalsegno" / "jobs"

    def list_jobs(self) -> list[dict[str, Any]]:
        files = self.jobs.glob("*/endpoint.json")
        found = [json.loads(path.read_text()) for path in files]
        wanted = ("job_id", "host", "port", "pid", "started_at", "output_dir", "logging_dir")
        jobs = [{name: each[name] for name in wanted} for each in found]
        return sorted(jobs, key=lambda job: job["started_at"], reverse=True)

    def send_command(self, job_id: str, command: str, data: dict[str, Any] | None = None) -> Answer:
        return self._ask(job_id, "POST", "control", {"command": command, "data": data or {}})

    def get_status(self, job_id: str) -> Any:
        return self._ask(job_id, "GET", "status").json

    def _ask(self, job_id: str, method: str, what: str, body: Any = None) -> Answer:
        folder = self.jobs / job_id
        job = json.loads((folder / "endpoint.json").read_text())
        token = (folder / "auth_token").read_text()
        connection = http.client.HTTPConnection(job["host"], job["port"], timeout=30)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "User-Agent": "forgather-trainer-control",
        }
        connection.request(method, f"/jobs/{job_id}/{what}", json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), dict(answer.getheaders()))


class Stream:
    """Server-sent events, one at a time."""

    def __init__(self, port: int, path: str, token: str, last_event_id: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        resumed = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        self._connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **resumed})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.last_id: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Kind and data; ends when the server ends the stream."""
        fields: dict[str, str] = {}
        while line := self._answer.readline():
            text = line.decode().rstrip("\n")
            if text:
                name, _, value = text.partition(": ")
                fields[name] = value
                continue
            if "data" in fields:
                self.last_id = fields.get("id", self.last_id)
                yield fields["event"], json.loads(fields["data"])
            fields = {}

    def close(self) -> None:
        """As a browser that is closed: in the middle of whatever comes."""
        self._answer.close()
        self._connection.close()


def connect(port: int, data: bytes = b"") -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=60)
    raw.sendall(data)
    return raw


def is_closed_by_peer(raw: socket.socket) -> bool:
    """Waits until it is, or until the socket's own timeout."""
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
