"""The registry of jobs: private files, found again, told apart from reused pids, and removed without touching more."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dalsegno.control import jobs
from dalsegno.control.jobs import Registration, find_job, list_jobs, read_token, remove_dead
from dalsegno.errors import ConfigurationError, Locked
from dalsegno.system import filesystem


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "dalsegno" / "jobs"


def register(job_id: str = "one", /, **changes: Any) -> Path:
    """A job of this process; ``changes`` are made to its file."""
    registration = Registration(job_id, Path("runs/a"), Path("runs/a/logs"))
    registration.publish("127.0.0.1", 8900, "secret")
    path = registration.directory / "endpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return registration.directory


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_a_job_from_the_moment_its_files_exist(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask is: each file has its permissions at the first byte that is written to it."""
    seen = {}

    def watch(operation: str, path: Path) -> None:
        if operation == "write" and "jobs" in path.parts:
            seen[path.name] = permissions(path), permissions(path.parent)

    monkeypatch.setattr(filesystem, "watcher", watch)
    before = os.umask(0)
    try:
        folder = register()
    finally:
        os.umask(before)
    assert seen == {".auth_token.tmp": (0o600, 0o700), ".endpoint.json.tmp": (0o600, 0o700)}
    assert [permissions(path) for path in (registry, folder)] == [0o700, 0o700]
    assert sorted(path.name for path in folder.iterdir()) == ["auth_token", "endpoint.json"]
    assert {permissions(path) for path in folder.iterdir()} == {0o600}
    assert "secret" not in (folder / "endpoint.json").read_text()


def test_a_registry_that_others_can_read_is_closed(registry: Path) -> None:
    registry.mkdir(parents=True, mode=0o755)
    register()
    assert permissions(registry) == 0o700


def test_a_job_is_found_with_what_is_needed_to_reach_it() -> None:
    register("one")
    job = find_job("one")
    assert job is not None and job.endpoint is not None
    assert job.state == "running"
    assert job.endpoint.output_dir == os.path.abspath("runs/a")
    assert job.endpoint.base_url == "http://127.0.0.1:8900"
    assert read_token("one") == "secret"


def test_a_reused_pid_is_another_process() -> None:
    """This process lives, but it started at another time than the one that wrote the file."""
    register(process_start=1)
    assert [job.state for job in list_jobs()] == ["dead"]


def test_the_pid_of_somebody_else_is_not_the_job() -> None:
    register(pid=1)
    assert [job.state for job in list_jobs()] == ["dead"]


def test_a_killed_process_is_dead_also_before_it_is_waited_for() -> None:
    """A zombie still has its pid and its start time."""
    script = (
        "import os, signal; from pathlib import Path; from dalsegno.control.jobs import Registration;"
        "Registration('killed', Path('a'), Path('b')).publish('127.0.0.1', 8900, None);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=os.environ) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [job.state for job in list_jobs()] == ["dead"]


def test_a_job_of_another_host_is_kept_and_one_of_an_earlier_boot_is_dead() -> None:
    register("far", hostname="node-7", pid=2**22 + 1)
    register("before", boot_id="another")
    assert {job.job_id: job.state for job in list_jobs()} == {"far": "elsewhere", "before": "dead"}
    assert [job.job_id for job in remove_dead()] == ["before"]
    assert [job.job_id for job in list_jobs()] == ["far"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"job_id": "one"}', b"[" * 100_000, b" " * 100_000,
        b'{"job_id": ["one"], "pid": true}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_listed_as_such_and_hides_no_other_job(content: bytes) -> None:
    (register("one") / "endpoint.json").write_bytes(content)
    register("two")
    assert {job.job_id: job.state for job in list_jobs()} == {"one": "unreadable", "two": "running"}
    assert remove_dead() == []
    assert [job.job_id for job in remove_dead(unreadable=True)] == ["one"]


@pytest.mark.parametrize("job_id", ["../two", "/etc", "two", ".."])
def test_no_path_is_built_from_a_files_content(tmp_path: Path, job_id: str) -> None:
    """A file that claims another id, which would lead elsewhere, is damaged; what it names stays."""
    register("two")
    folder = register("one", job_id=job_id, output_dir=str(tmp_path / "precious"), pid=2**22 + 1)
    (tmp_path / "precious").mkdir()
    assert next(job.state for job in list_jobs() if job.job_id == "one") == "unreadable"
    remove_dead(unreadable=True)
    assert not folder.exists()
    assert (tmp_path / "precious").is_dir()
    assert find_job("two") is not None


def test_cleanup_follows_no_link_and_keeps_what_it_did_not_write(tmp_path: Path, registry: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "endpoint.json").write_text((register("model", process_start=1) / "endpoint.json").read_text())
    (registry / "link").symlink_to(outside)
    notes = register("dead", process_start=1) / "notes.txt"
    notes.write_text("mine")
    remove_dead(unreadable=True)
    assert (outside / "endpoint.json").exists()
    assert notes.read_text() == "mine"
    assert list(notes.parent.iterdir()) == [notes]


def test_a_token_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    folder = register()
    (tmp_path / "other").write_text("not a token")
    (folder / "auth_token").unlink()
    (folder / "auth_token").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        read_token("one")


def test_an_id_is_taken_while_its_job_lives(registry: Path) -> None:
    register("one")
    with pytest.raises(Locked, match=f"job_id='one' is in use by process {os.getpid()}"):
        Registration("one", Path("b"), Path("b"))
    register("two", process_start=1)
    Registration("two", Path("b"), Path("b")).publish("127.0.0.1", None, None)  # its job is dead
    assert not (registry / "two" / "auth_token").exists()


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "-x", "a b", "a\n", "ä", "x" * 129])
def test_an_id_that_is_not_a_name_is_refused(job_id: str) -> None:
    with pytest.raises(ConfigurationError, match="job_id="):
        Registration(job_id, Path("a"), Path("a"))
    assert find_job(job_id) is None


def test_each_new_id_differs_and_is_valid() -> None:
    ids = {jobs.new_job_id() for _ in range(100)}
    assert len(ids) == 100
    assert {jobs.check_job_id(each) for each in ids} == ids
