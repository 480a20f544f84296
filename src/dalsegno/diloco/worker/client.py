"""DiLoCoClient: what a worker asks a DiLoCo server. Tensors go straight between their memory and the socket.

It uses the standard library's HTTP: that writes a buffer to the socket, and reads the socket into a buffer, without a
copy.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from urllib.parse import quote, urlsplit

import torch

from dalsegno.diloco.wire.messages import FrameLayout, FrameReader, Result, Settings, Submission, bytes_of, frame_pieces
from dalsegno.diloco.wire.signature import Specs
from dalsegno.errors import ConfigurationError, NotFound, NotRunning, StateMismatch
from dalsegno.web.security import trusting

from .options import WorkerOptions

_LARGEST_ANSWER = 1 << 24
_POLL = 30.0  # seconds that one request waits for a result
_FRESH = 4.0  # seconds for which an idle connection is used again; the server closes it after 8
_ERRORS = {400: ConfigurationError, 404: NotFound, 409: StateMismatch, 503: NotRunning}


class DiLoCoClient:
    """A connection to a server; one request at a time.

    Args:
        address: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``HOST:PORT``.
        token: bearer token; None: none is sent.
        certificate: PEM of the server's certificate, the only one that is trusted; None: the system's authorities are.
        timeout: seconds for a part of a request or an answer to be taken.

    Every method raises:
        NotRunning: if the server is not there, is cut off, or cannot work: trying again may help.
        StateMismatch: if the request does not fit the run, or comes too late.
        NotFound: if it does not have what is asked for.
        ConfigurationError: if the token is refused, or the request cannot work.
    """

    def __init__(
        self, address: str, *, token: str | None = None, certificate: str | None = None, timeout: float = 60.0
    ) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host or port is None or parts.path not in ("", "/"):
            raise ConfigurationError(f"server_addr={address!r}; needs HOST:PORT, http://HOST:PORT or https://HOST:PORT")
        self.address = f"{parts.scheme}://{parts.netloc}"
        self.bytes_sent = 0
        """Of requests' bodies."""
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http: http.client.HTTPConnection
        if parts.scheme == "https":
            context = None if certificate is None else trusting(certificate)
            self._http = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=timeout)
        self._timeout = timeout
        self._used = 0.0  # when the last answer ended, in monotonic time
        self._busy = threading.Lock()

    def status(self) -> dict[str, Any]:
        """Version, workers, bytes."""
        return self._ask("GET", "/status")

    def register(
        self, worker_id: str, settings: Settings, *, count: int | None, run_id: str | None, dylu: bool
    ) -> dict[str, Any]:
        """Join the run, or come back to it: see :meth:`.Coordinator.register`."""
        progress = {"count": count, "run_id": run_id, "dylu": dylu}
        body = {"worker_id": worker_id, "settings": dataclasses.asdict(settings), **progress}
        return self._ask("POST", "/register", body)

    def heartbeat(self, worker_id: str) -> None:
        """Show that the worker is alive."""
        self._ask("POST", "/heartbeat", {"worker_id": worker_id})

    def deregister(self, worker_id: str) -> None:
        """End the worker's part."""
        self._ask("POST", "/deregister", {"worker_id": worker_id})

    def offer(self, submission: Submission) -> bool:
        """Describe a submission. Returns whether it is to be sent; False if the server has it."""
        return bool(self._ask("POST", "/submissions", dataclasses.asdict(submission))["send"])

    def submit(self, submission: Submission, specs: Specs, tensors: Iterable[torch.Tensor]) -> None:
        """Send a submission that was offered. When this returns, the server has it on disk.

        ``tensors``: on the CPU, in the order of :func:`.messages.in_file_order`; each is taken when the former is sent.
        """
        path = f"/submissions/{quote(submission.worker_id)}/{submission.number}"
        self._send(path, dataclasses.asdict(submission), specs, tensors)

    def initialize(self, worker_id: str, specs: Specs, tensors: Iterable[torch.Tensor]) -> None:
        """Send the run's first parameters, as :meth:`submit` does."""
        self._send(f"/parameters/{quote(worker_id)}", {}, specs, tensors)

    def result(self, worker_id: str, number: int, *, wait: float = 0.0) -> Result | None:
        """What became of a submission; None if it is not known within ``wait`` seconds."""
        path = f"/results/{quote(worker_id)}/{number}?wait={wait:g}"
        result = self._ask("GET", path, wait=wait)["result"]
        return None if result is None else Result(**result)

    def await_result(self, worker_id: str, number: int, timeout: float) -> Result:
        """Wait for what becomes of a submission, at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            result = self.result(worker_id, number, wait=min(_POLL, left))
            if result is not None:
                return result
        raise NotRunning(f"no result of submission {number} within {timeout:g} s")

    def fetch(self, result: Result, specs: Specs, take: Callable[[FrameReader], object]) -> None:
        """Fetch the parameters of a result; ``take`` reads all tensors, in the order of the reader."""
        query = "" if result.fragment is None else f"?fragment={result.fragment}"
        with self._busy:
            answer = self._request("GET", f"/parameters/{result.version}{query}")
            with self._failing():
                try:
                    reader = FrameReader(partial(_fill, answer), specs)
                    take(reader)
                    reader.end()
                except ConfigurationError as error:
                    raise NotRunning(f"{self.address}: {error}") from error
                answer.read()

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, path: str, head: Mapping[str, Any], specs: Specs, tensors: Iterable[torch.Tensor]) -> None:
        layout = FrameLayout(head, specs)
        with self._busy:
            with self._failing():
                self._refresh()
                self._http.putrequest("PUT", path)
                for name, value in self._headers.items():
                    self._http.putheader(name, value)
                self._http.putheader("Content-Length", str(layout.length))
                self._http.endheaders()
                for piece in frame_pieces(layout, bytes_of(tensors)):
                    self._http.send(piece)
            answer = self._answer()
            with self._failing():
                answer.read()
            self._used = time.monotonic()
        self.bytes_sent += layout.length

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, wait: float = 0.0
    ) -> dict[str, Any]:
        with self._busy:
            answer = self._request(method, path, body, wait=wait)
            with self._failing():
                data = answer.read(_LARGEST_ANSWER)
            self._used = time.monotonic()
        return _content(self.address, data)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, wait: float = 0.0
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        with self._failing():
            self._refresh()
            self._http.sock.settimeout(self._timeout + wait)
            self._http.request(method, path, data, self._headers)
            self.bytes_sent += len(data or b"")
        return self._answer()

    def _refresh(self) -> None:
        """Connect, unless a connection is open that the server has not closed for being idle."""
        if time.monotonic() - self._used > _FRESH:
            self._http.close()
        if self._http.sock is None:
            self._http.connect()
        self._http.sock.settimeout(self._timeout)

    def _answer(self) -> http.client.HTTPResponse:
        """Raises the error that the answer reports."""
        with self._failing():
            answer = self._http.getresponse()
            if answer.status == 200:
                return answer
            data = answer.read(_LARGEST_ANSWER)
            self._http.close()
        if answer.status == 401:
            raise ConfigurationError(f"{self.address}: the token is missing or wrong; set DILOCO_TOKEN or _TOKEN_FILE")
        reason = _content(self.address, data).get("error", answer.reason)
        kind = _ERRORS.get(answer.status, NotRunning if answer.status >= 500 else ConfigurationError)
        raise kind(f"{self.address}: {reason}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns failures of the connection into NotRunning, and closes it after any failure."""
        try:
            yield
        except BaseException as error:
            self._http.close()
            if isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(error, NotFound):
                raise NotRunning(f"{self.address}: {error or type(error).__name__}") from error
            raise


def connect(options: WorkerOptions) -> DiLoCoClient:
    return DiLoCoClient(
        str(options.server_addr), token=options.token, certificate=options.certificate, timeout=options.timeout
    )


def _fill(answer: http.client.HTTPResponse, memory: memoryview) -> None:
    while len(memory):
        count = answer.readinto(memory)
        if not count:
            raise http.client.IncompleteRead(b"")
        memory = memory[count:]


def _content(address: str, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise NotRunning(f"{address}: did not answer with a JSON object; is it a DiLoCo server?")
    return content
