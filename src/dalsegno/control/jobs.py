"""Registry of jobs: one directory per running job in the user's state folder.

::

    ~/.local/state/dalsegno/jobs/           $XDG_STATE_HOME/dalsegno/jobs, 0700
      job_1764000000_node-7_4711/           0700; the directory's name is the job's id
        endpoint.json                       0600; where the job's server listens, and which process it is
        auth_token                          0600; the bearer token

A job writes its own files and removes them at its end; a killed one leaves them. A process is recognized by its id
*and* its start time, because the kernel reuses ids. Paths are built from directory names only, never from a file's
content.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dalsegno.errors import ConfigurationError, Locked, NotFound
from dalsegno.logs.values import decode
from dalsegno.stateful.schema import check
from dalsegno.system import filesystem
from dalsegno.system.machine import boot_id

ENDPOINT = "endpoint.json"
TOKEN = "auth_token"

JobState = Literal["running", "dead", "elsewhere", "unreadable"]
"""``elsewhere``: on another host, from which this one cannot see whether the process is alive."""

_FILES = (ENDPOINT, TOKEN)
_LARGEST = 1 << 16  # bytes; an endpoint file has a few hundred, or some thousand with a certificate
_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DEAD_STATES = (b"Z", b"X", b"x")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Content of ``endpoint.json``."""

    job_id: str
    host: str
    """Address that the server is bound to."""
    port: int | None
    """None: the job has no server; it reads commands from files only."""
    pid: int
    started_at: float
    """UTC seconds."""
    output_dir: str
    """Absolute."""
    logging_dir: str
    hostname: str
    process_start: int | None
    """Start of the process in clock ticks after boot; None where the system does not tell."""
    boot_id: str | None
    """Identifies the boot of the machine; None where the system does not tell."""
    certificate: str | None = None
    """The server's TLS certificate in PEM; None: plain HTTP."""

    @property
    def base_url(self) -> str:
        """Raises NotFound if the job has no server."""
        if self.port is None:
            raise NotFound(f"job {self.job_id} has no server, which this needs; status, save, stop and others do not")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Job:
    """A directory of the registry."""

    job_id: str
    state: JobState
    endpoint: Endpoint | None
    """None if the file is unreadable."""


def jobs_directory() -> Path:
    """Folder of this user's jobs."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return state / "dalsegno" / "jobs"


def new_job_id() -> str:
    """An id that no other job of this user has."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", os.uname().nodename)[:64]
    return f"job_{time.time_ns() // 1000}_{host}_{os.getpid()}"


def check_job_id(job_id: str) -> str:
    """Raises ConfigurationError if ``job_id`` cannot be a directory's name and a part of an address."""
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise ConfigurationError(
            f"job_id={job_id!r}; must be 1 to 128 letters, digits, '.', '_' or '-', and not begin with '.' or '-'"
        )
    return job_id


class Registration:
    """This process's entry in the registry.

    Args:
        job_id: unique among this user's running jobs.

    Raises Locked if a running job has the same id; OSError if the state folder is not writable.
    """

    def __init__(self, job_id: str, output_dir: Path, logging_dir: Path) -> None:
        self.job_id = check_job_id(job_id)
        self.directory = jobs_directory() / job_id
        self._output_dir, self._logging_dir = output_dir.absolute(), logging_dir.absolute()
        self._started_at = time.time()
        other = find_job(job_id)
        if other is not None and other.endpoint is not None and other.state in ("running", "elsewhere"):
            raise Locked(
                f"job_id={job_id!r} is in use by process {other.endpoint.pid} on {other.endpoint.hostname}; "
                "choose another one, or leave it out"
            )
        filesystem.make_private_directory(jobs_directory())
        filesystem.make_private_directory(self.directory)

    def publish(self, host: str, port: int | None, token: str | None, certificate: str | None = None) -> Endpoint:
        """Write the files, or replace them. A reader sees a complete old file or a complete new one."""
        endpoint = Endpoint(
            job_id=self.job_id,
            host=host,
            port=port,
            pid=os.getpid(),
            started_at=self._started_at,
            output_dir=str(self._output_dir),
            logging_dir=str(self._logging_dir),
            hostname=os.uname().nodename,
            process_start=_process_start(os.getpid()),
            boot_id=boot_id(),
            certificate=certificate,
        )
        if token is None:
            filesystem.remove(self.directory / TOKEN)
        else:
            filesystem.replace_durably(self.directory / TOKEN, token.encode(), 0o600)
        text = json.dumps(asdict(endpoint), indent=2) + "\n"
        filesystem.replace_durably(self.directory / ENDPOINT, text.encode(), 0o600)
        return endpoint

    def remove(self) -> None:
        """Remove the files and the directory."""
        _remove(self.directory)


def list_jobs() -> list[Job]:
    """All jobs of the registry, the newest first."""
    try:
        names = sorted(path.name for path in jobs_directory().iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    jobs = [job for name in names if (job := find_job(name)) is not None]
    return sorted(jobs, key=lambda job: job.endpoint.started_at if job.endpoint else 0.0, reverse=True)


def find_job(job_id: str) -> Job | None:
    """The job with exactly this id, running or not; None if there is none."""
    if not _JOB_ID.fullmatch(job_id):
        return None
    path = jobs_directory() / job_id
    try:
        endpoint: Endpoint | None = _parse(read_small(path / ENDPOINT))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        endpoint = None
    if endpoint is None or endpoint.job_id != job_id:
        return Job(job_id, "unreadable", None)
    return Job(job_id, _state_of(endpoint), endpoint)


def read_token(job_id: str) -> str | None:
    """The job's bearer token; None if it needs none. Raises OSError if the file is not readable, or is a link."""
    try:
        return read_small(jobs_directory() / check_job_id(job_id) / TOKEN).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None


def write_private(name: str, text: str) -> Path:
    """Write a file that only this user can read, beside the registry's directory."""
    path = jobs_directory().parent / name
    filesystem.make_private_directory(path.parent)
    filesystem.replace_durably(path, text.encode(), 0o600)
    return path


def remove_dead(*, unreadable: bool = False) -> list[Job]:
    """Remove the files of jobs whose process is dead, and return these jobs. Nothing outside the registry is touched.

    Jobs of other hosts are kept. ``unreadable``: also those whose file cannot be read.
    """
    kinds = ("dead", "unreadable") if unreadable else ("dead",)
    removed = [job for job in list_jobs() if job.state in kinds]
    for job in removed:
        _remove(jobs_directory() / job.job_id)
    return removed


def _remove(directory: Path) -> None:
    """Remove this module's files from ``directory``, and the directory if nothing else is in it."""
    if directory.is_symlink():
        return
    for name in _FILES:
        for each in (directory / name, directory / f".{name}.tmp"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                filesystem.notify_watcher("unlink", each)
                each.unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()


def read_small(path: Path) -> bytes:
    """Content of a small regular file that is not a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigurationError("it is not a regular file")
        data = os.read(descriptor, _LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(data) > _LARGEST:
        raise ConfigurationError(f"it is larger than {_LARGEST} bytes")
    return data


def _parse(data: bytes) -> Endpoint:
    content = decode(data)
    check(content, dict[str, Any], ENDPOINT)
    fields = {name: content.get(name) for name in Endpoint.__slots__}  # another version may write more, or fewer
    check(fields, Endpoint, ENDPOINT)
    return Endpoint(**fields)


def _state_of(endpoint: Endpoint) -> JobState:
    """A job of an earlier boot of this host is dead. Where the start time is not known, the pid alone decides."""
    if endpoint.hostname != os.uname().nodename:
        return "elsewhere"
    if endpoint.boot_id != boot_id():
        return "dead"
    if endpoint.process_start is None:
        return "running" if _exists(endpoint.pid) else "dead"
    return "running" if _process_start(endpoint.pid) == endpoint.process_start else "dead"


def _process_start(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; None for a dead process, a zombie, and on systems other than Linux."""
    if sys.platform != "linux":
        return None
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_bytes().rpartition(b")")[2].split()  # the name may contain spaces
    except OSError:
        return None
    return None if fields[0] in _DEAD_STATES else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):  # a process of another user is not ours
        return False
    return pid > 0
