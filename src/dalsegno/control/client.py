"""JobClient: asks a running job over HTTP and sends it commands."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from dalsegno.errors import ConfigurationError, NotFound, NotRunning
from dalsegno.system.imports import require_extra
from dalsegno.system.lock import DirectoryLock
from dalsegno.web.security import trusting

from . import inbox
from .jobs import Endpoint, Job, check_job_id, find_job, list_jobs, read_token

if TYPE_CHECKING:
    import httpx

TIMEOUT = 10.0
"""Seconds for an answer, beyond those that a command waits for its effect."""


class JobClient:
    """A connection to one job's server.

    Args:
        base_url: ``http://HOST:PORT``.
        job_id: None: the job of that server.
        token: bearer token; None: none is sent.
        certificate: PEM of the server's certificate, the only one that is trusted; None: the system's authorities are.

    Every method raises:
        NotRunning: if nothing answers there, or the job takes no more commands.
        NotFound: if the job, or what is asked for, is not there.
        ConfigurationError: if the token is refused, or the server does not accept the request.
    """

    def __init__(
        self, base_url: str, job_id: str | None = None, *, token: str | None = None, certificate: str | None = None
    ) -> None:
        require_extra("control", "httpx", "asking a job over HTTP")
        import httpx

        self.base_url = base_url
        self.token = token
        self._job_id = job_id
        self._http = httpx.Client(
            base_url=base_url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT,
            verify=True if certificate is None else trusting(certificate),
            trust_env=False,  # a proxy would see the token, and no proxy leads to this machine
        )

    @classmethod
    def of(cls, job: Job) -> Self:
        """The client of a job of this user. Raises NotRunning if it is dead, NotFound if it has no server."""
        endpoint = running(job)
        return cls(endpoint.base_url, job.job_id, token=read_token(job.job_id), certificate=endpoint.certificate)

    @property
    def job_id(self) -> str:
        """Id of the job; asks the server, if it was not given."""
        if self._job_id is None:
            self._job_id = check_job_id(self._ask("GET", "/jobs").headers.get("dalsegno-job", ""))
        return self._job_id

    def jobs(self) -> list[dict[str, Any]]:
        """Jobs of the server's user, on its machine."""
        found = self._content("GET", "/jobs").get("jobs")
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def status(self) -> dict[str, Any]:
        """Step, epoch, and the last values that were logged."""
        return self._content("GET", self._path("status"))

    def callbacks(self) -> dict[str, Any]:
        """Callbacks of the run."""
        return self._content("GET", self._path("callbacks"))

    def send(self, command: str, data: Mapping[str, Any] | None = None, *, wait: float = 0.0) -> dict[str, Any]:
        """Send a command, and wait up to ``wait`` seconds for its effect. Returns the answer: ``id``, ``status``, and
        ``step`` once it has taken effect."""
        return self._content(
            "POST",
            self._path("control"),
            json={"command": command, "data": dict(data or {}), "by": sender()},
            params={"wait": wait} if wait else None,
            timeout=TIMEOUT + wait,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def _path(self, what: str) -> str:
        return f"/jobs/{quote(self.job_id, safe='')}/{what}"

    def _content(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._ask(method, path, **options)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ConfigurationError(f"{self.base_url}: did not answer with a JSON object; is it a dalsegno job?")
        return content

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        import httpx

        try:
            answer = self._http.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise NotRunning(f"{self.base_url}: no answer in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRunning(f"{self.base_url}: {error}") from error
        if answer.status_code != 200:
            raise _error(self.base_url, answer)
        return answer


def sender() -> str:
    """This user, as runs record who sent a command: ``ada@node-7``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = f"user {os.getuid()}"
    return f"{user}@{os.uname().nodename}"


def send_command(
    name: str, command: str, data: Mapping[str, Any] | None = None, *, wait: float = 0.0
) -> dict[str, Any]:
    """Send a command to the job with this id or output_dir: over HTTP, or as a file in its output_dir.

    Returns the answer of :meth:`JobClient.send`, and raises what that raises.
    """
    try:
        job = resolve(name)
    except NotFound:
        folder = Path(name)
        if not folder.is_dir():
            raise
        with contextlib.suppress(PermissionError):  # of another user: it may run
            if not DirectoryLock.is_held(folder):
                raise NotRunning(f"{name}: no run is training here; see 'dalsegno logs lineage {name}'") from None
    else:
        if asks_over_http(job):
            with JobClient.of(job) as client:
                return client.send(command, data, wait=wait)
        folder = Path(running(job).output_dir)
    answer = inbox.send(folder, command, data, by=sender(), timeout=max(wait, TIMEOUT), for_effect=wait > 0)
    if answer.kind is not None:
        raise NotRunning(answer.error) if answer.kind == NotRunning.__name__ else ConfigurationError(answer.error)
    status = "failed" if answer.error else "acknowledged" if answer.step is None else "done"
    return {"status": status, "command": command, "id": answer.id, "step": answer.step, "error": answer.error}


def asks_over_http(job: Job) -> bool:
    """Whether the job answers over HTTP, as far as this environment can ask, or cannot be reached in another way."""
    endpoint = running(job)
    return (endpoint.port is not None and find_spec("httpx") is not None) or not Path(endpoint.output_dir).is_dir()


def resolve(name: str) -> Job:
    """The job that ``name`` names: by its id, by the beginning of the id of one running job, or by its output_dir.
    Raises NotFound if there is none, or several."""
    job = find_job(name)
    if job is not None:
        return job
    alive = [each for each in list_jobs() if each.endpoint is not None and each.state == "running"]
    folder = os.path.realpath(name)
    in_folder = [each for each in alive if each.endpoint and os.path.realpath(each.endpoint.output_dir) == folder]
    found = in_folder or [each for each in alive if each.job_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{name!r} names {len(found)} running jobs: {', '.join(each.job_id for each in found)}")
    raise NotFound(f"{name!r}: no such job is running here; 'dalsegno jobs list' shows those that are")


def running(job: Job) -> Endpoint:
    """Raises NotRunning if the job's process is dead, or its file cannot be read."""
    if job.endpoint is None:
        raise NotRunning(f"job {job.job_id}: its file cannot be read; 'dalsegno jobs cleanup --unreadable' removes it")
    if job.state == "dead":
        raise NotRunning(f"job {job.job_id}: its process {job.endpoint.pid} has ended without removing its file")
    return job.endpoint


def _error(base_url: str, answer: httpx.Response) -> Exception:
    try:
        said = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        said = answer.reason_phrase
    text = f"{base_url}: {said}"
    if answer.status_code == 401:
        return ConfigurationError(f"{base_url}: the token is missing or wrong")
    if answer.status_code == 404:
        return NotFound(text)
    return NotRunning(text) if answer.status_code == 409 else ConfigurationError(text)
