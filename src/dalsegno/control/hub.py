"""Hub: serves the live page for all jobs of this user on this machine, and passes its requests on to their servers.

The page only talks to the server that it is from. With each job's own server, a page of several jobs would need all
their tokens in the browser, an exception from the same-origin rule in every job, and new addresses after every restart.
The hub reads addresses and tokens from the registry at each request. It listens on the loopback address and has a token
of its own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from dalsegno.errors import DalsegnoError, NotFound
from dalsegno.web.answers import Answer, answer_error, off_loop, read_body
from dalsegno.web.security import Gate, trusting
from dalsegno.web.server import ServerThread

from .api import answer_page, list_endpoints
from .client import running
from .jobs import Endpoint, find_job, read_token

HOST = "127.0.0.1"

_CONNECT_TIMEOUT = 5.0  # seconds. What is asked may take long: a stream, a command that is waited for.
_FORWARDED = ("content-type", "last-event-id")
_RETURNED = ("content-type", "cache-control")


def hub_server(
    listener: socket.socket, token: str, on_failure: Callable[[BaseException], None] | None = None
) -> ServerThread:
    """A hub on ``listener``, which it closes at the end. ``on_failure``: as of a :class:`ServerThread`."""

    def build(stopping: asyncio.Event) -> ASGIApp:
        hub = _Hub()
        routes = [
            Route("/", answer_page),
            Route("/jobs", hub.jobs),
            Route("/jobs/{job_id}/{rest:path}", hub.forward, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: answer_error}, lifespan=hub.lifespan)
        return Gate(app, host=HOST, token=token, open_paths={"/"})

    return ServerThread(listener, build, name="dalsegno-hub", tls=None, on_failure=on_failure)


class _Hub:
    def __init__(self) -> None:
        self._clients: dict[tuple[str, str | None], httpx.AsyncClient] = {}  # by address and certificate

    async def jobs(self, request: Request) -> Response:
        return Answer({"jobs": await off_loop(list_endpoints)})

    async def forward(self, request: Request) -> Response:
        """Pass a request on to its job, and the answer back as it arrives."""
        try:
            endpoint, token = await off_loop(partial(_find, request.path_params["job_id"]))
            client = self._client(endpoint)
        except (DalsegnoError, OSError) as error:
            raise HTTPException(404, str(error)) from error
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        query = request.scope["query_string"]
        target = client.base_url.copy_with(raw_path=request.scope["raw_path"] + (b"?" + query if query else b""))
        sent = client.build_request(request.method, target, content=await read_body(request), headers=headers)
        try:
            answer = await client.send(sent, stream=True)
        except httpx.HTTPError as error:
            raise HTTPException(502, f"{client.base_url}: {error or type(error).__name__}") from error
        returned = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
        return StreamingResponse(_pieces(answer), answer.status_code, returned)

    def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        key = endpoint.base_url, endpoint.certificate
        if key not in self._clients:
            self._clients[key] = httpx.AsyncClient(
                base_url=endpoint.base_url,
                headers={"Accept-Encoding": "identity"},
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
                verify=True if endpoint.certificate is None else trusting(endpoint.certificate),
                trust_env=False,  # a proxy would see the token
            )
        return self._clients[key]

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for client in self._clients.values():
            await client.aclose()


def _find(job_id: str) -> tuple[Endpoint, str | None]:
    """Endpoint and token of a running job. Raises NotFound if there is no such job; NotRunning if it is dead; OSError
    if its token is not readable."""
    job = find_job(job_id)
    if job is None:
        raise NotFound(f"job {job_id}: not running")
    return running(job), read_token(job_id)


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The answer's body, as far as it comes: the job's server may end in the middle."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError:
        return
    finally:
        await answer.aclose()
