"""The hub: passes the live page's requests on to the jobs' servers, and nothing without its own token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from control.talking import Answer, Stream, ask
from control.test_server import Served
from dalsegno import cli
from dalsegno.control.hub import hub_server
from dalsegno.control.jobs import Registration
from dalsegno.web.security import new_token, tls_context
from dalsegno.web.server import listen

TOKEN = new_token()
JOBS_TOKEN = new_token()


class Hub:
    """A hub on a thread, and one job, whose server has another token."""

    def __init__(self, folder: Path, certificate: tuple[Path, Path] | None = None) -> None:
        tls, pem = (tls_context(*certificate), certificate[0].read_text()) if certificate else (None, None)
        self.job = Served(folder, token=JOBS_TOKEN, tls=tls)
        self.registration = Registration("job", folder, folder / "logs")
        self.registration.publish("127.0.0.1", self.job.port, JOBS_TOKEN, pem)
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self._server = hub_server(listener, TOKEN)
        self._server.start()

    def ask(self, method: str, path: str, body: object = None, token: str | None = TOKEN) -> Answer:
        return ask(self.port, method, path, body, token=token)

    def close(self) -> None:
        self._server.stop()
        assert not self._server._thread.is_alive()
        self.job.server.stop()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    hub = Hub(tmp_path)
    yield hub
    hub.close()


def test_it_needs_its_own_token_and_sends_the_jobs(hub: Hub) -> None:
    assert hub.ask("GET", "/jobs/job/status").json["job_id"] == "job"
    assert [each["job_id"] for each in hub.ask("GET", "/jobs").json["jobs"]] == ["job"]
    for token in (None, JOBS_TOKEN):
        for method, path in (("GET", "/jobs"), ("GET", "/jobs/job/status"), ("POST", "/jobs/job/control")):
            assert hub.ask(method, path, {"command": "abort"}, token=token).status == 401
    assert hub.job.act(1) == []
    assert hub.ask("GET", "/", token=None).body.startswith(b"<!doctype html>")
    everything = hub.ask("GET", "/jobs").body + hub.ask("GET", "/").body
    assert JOBS_TOKEN.encode() not in everything and TOKEN.encode() not in everything


def test_commands_and_refusals_are_passed_on(hub: Hub) -> None:
    answer = hub.ask("POST", "/jobs/job/control", {"command": "save_checkpoint"})
    assert answer.status == 200
    assert hub.job.act(7) == ["save_checkpoint"]
    done = hub.ask("GET", f"/jobs/job/commands/{answer.json['id']}?wait=10").json
    assert (done["status"], done["step"]) == ("done", 7)
    refused = hub.ask("POST", "/jobs/job/control", {"command": "explode"})
    assert refused.status == 400 and "save_checkpoint" in refused.json["valid_commands"]
    assert hub.ask("POST", "/jobs/job/control", b"x" * 70_000).status == 413
    assert hub.ask("DELETE", "/jobs/job/status").status == 405


def test_another_host_header_or_web_page_is_refused(hub: Hub) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert ask(hub.port, "GET", "/jobs", token=TOKEN, headers=headers).status in (403, 421)


def test_a_stream_arrives_as_it_is_sent_and_ends_with_the_job(hub: Hub) -> None:
    hub.job.job.note_log({"loss": 1.0}, "train")
    stream = Stream(hub.port, "/jobs/job/stream", TOKEN)
    messages = iter(stream)
    kind, record = next(messages)
    assert (kind, record["loss"]) == ("record", 1.0)
    hub.job.job.note_event("save", step=3)
    assert next(messages)[1]["event"] == "save"
    resumed = Stream(hub.port, "/jobs/job/stream", TOKEN, stream.last_id)
    hub.job.job.note_log({"loss": 2.0}, "train")
    assert next(iter(resumed))[1]["loss"] == 2.0
    resumed.close()
    hub.job.server.stop()
    assert [kind for kind, _ in messages][-1] == "end"
    stream.close()


def test_a_job_that_is_gone_is_an_error_of_its_own(hub: Hub) -> None:
    hub.job.server.stop()
    assert hub.ask("GET", "/jobs/job/status").status == 502
    hub.registration.remove()
    assert hub.ask("GET", "/jobs/job/status").status == 404
    for path in ("/jobs/none/status", "/jobs/%2e%2e/status", "/jobs/..%2fjob/status"):
        assert hub.ask("GET", path).status == 404


def test_it_trusts_a_jobs_own_certificate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    certificate: tuple[Path, Path],
) -> None:
    """Which a browser would not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    hub = Hub(tmp_path, certificate)
    try:
        assert hub.job.port and hub.ask("GET", "/jobs/job/status").json["job_id"] == "job"
    finally:
        hub.close()


def test_its_command_fails_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def break_(self: object) -> None:
        raise OSError("no more")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(uvicorn.Server, "main_loop", break_)
    assert cli.main(["jobs", "open", "--print"]) == 2
    assert capsys.readouterr().err == "dalsegno: no more\n"
