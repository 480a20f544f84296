"""API: the addresses that a DiLoCo server answers, as an ASGI application.

::

    POST /register                          {"worker_id", "settings", "count", "run_id", "dylu"}
    POST /heartbeat                         {"worker_id"}
    POST /deregister                        {"worker_id"}
    PUT  /parameters/WORKER                 frame: the first parameters, of a worker that was asked for them
    GET  /parameters/VERSION[?fragment=K]   frame
    POST /submissions                       describes a submission; answers whether it is to be sent
    PUT  /submissions/WORKER/NUMBER         frame: the submission
    GET  /results/WORKER/NUMBER[?wait=S]    what became of it
    GET  /status

A frame's size is checked before its body is read; the body goes to disk as it arrives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from functools import partial
from io import FileIO
from typing import Any, NotRequired, TypedDict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dalsegno.diloco.wire.messages import FrameReader, Settings, Submission, WorkerId, length_limits
from dalsegno.diloco.wire.signature import Specs
from dalsegno.errors import ConfigurationError, NotFound, NotRunning, StateMismatch
from dalsegno.stateful.schema import Count, check
from dalsegno.web.answers import Answer, answer_error, first_of, off_loop, read_json
from dalsegno.web.security import Gate

from .coordinator import Coordinator
from .files import Bell, Growth, SpooledTensors

LARGEST_DESCRIPTION = 1 << 26
"""Bytes of a worker's description of its model."""

LONGEST_WAIT = 60.0
"""Seconds that ``wait`` may ask for; a worker asks again."""

_PIECE = 1 << 20  # bytes of a file that are read and sent at a time
_STATUS = {ConfigurationError: 400, NotFound: 404, StateMismatch: 409, NotRunning: 503}


class _Registration(TypedDict):
    worker_id: WorkerId
    settings: Settings
    count: NotRequired[Count | None]
    run_id: NotRequired[str | None]
    dylu: bool


def build_app(
    coordinator: Coordinator, bell: Bell, stopping: asyncio.Event, *, host: str, token: str | None
) -> ASGIApp:
    api = _Api(coordinator, bell, stopping)
    routes = [
        Route("/status", api.status),
        Route("/register", api.register, methods=["POST"]),
        Route("/heartbeat", api.heartbeat, methods=["POST"]),
        Route("/deregister", api.deregister, methods=["POST"]),
        Route("/parameters/{version:int}", api.parameters),
        Route("/parameters/{worker_id}", api.initialize, methods=["PUT"]),
        Route("/submissions", api.offer, methods=["POST"]),
        Route("/submissions/{worker_id}/{number:int}", api.submit, methods=["PUT"]),
        Route("/results/{worker_id}/{number:int}", api.result),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: answer_error, **dict.fromkeys((*_STATUS, OSError), _explain)},
    )
    app.router.redirect_slashes = False
    return Gate(app, host=host, token=token, open_paths=())


async def _explain(request: Request, error: Exception) -> Response:
    """Answer an error of the coordinator, or that of a full disk."""
    status = next((_STATUS[kind] for kind in _STATUS if isinstance(error, kind)), None)
    reason = str(error) if status else f"the server cannot write: {error}"
    return await answer_error(request, HTTPException(status or 503, reason))


class _Api:
    def __init__(self, coordinator: Coordinator, bell: Bell, stopping: asyncio.Event) -> None:
        self._coordinator = coordinator
        self._bell = bell
        self._stopping = stopping
        self._offered: dict[str, tuple[Submission, Specs]] = {}  # the newest of each worker
        self._described: dict[str, Settings] = {}  # of workers that were asked for the first parameters

    async def status(self, request: Request) -> Response:
        return Answer(await off_loop(self._coordinator.status))

    async def register(self, request: Request) -> Response:
        given = check(await read_json(request, LARGEST_DESCRIPTION), _Registration, "registration", ConfigurationError)
        answer = await off_loop(partial(self._coordinator.register, **{"count": None, "run_id": None, **given}))
        if answer["needs_parameters"]:
            self._described[given["worker_id"]] = given["settings"]
        else:
            self._described.clear()
        return Answer(answer)

    async def heartbeat(self, request: Request) -> Response:
        self._coordinator.rounds.note_seen(await _worker_id_in(request))
        return Answer({})

    async def deregister(self, request: Request) -> Response:
        await off_loop(partial(self._coordinator.deregister, await _worker_id_in(request)))
        return Answer({})

    async def initialize(self, request: Request) -> Response:
        settings = self._described.get(request.path_params["worker_id"])
        if settings is None:
            raise StateMismatch("this worker was not asked for parameters; register first")
        specs = settings.specs()

        def finish(arrived: SpooledTensors) -> None:
            self._coordinator.initialize(arrived, settings.num_fragments)

        return await self._receive(request, specs, lambda head: None, finish)

    async def parameters(self, request: Request) -> Response:
        fragment = request.query_params.get("fragment")
        if fragment is not None and not (fragment.isdecimal() and len(fragment) < 9):
            raise ConfigurationError("fragment: an integer")
        version = request.path_params["version"]
        find = partial(self._coordinator.parameters, version, None if fragment is None else int(fragment))
        return _FileAnswer(*await off_loop(find))

    async def offer(self, request: Request) -> Response:
        submission = _submission_in(await read_json(request))
        specs = await off_loop(partial(self._coordinator.offer, submission))
        if specs is not None:
            self._offered[submission.worker_id] = submission, specs
        return Answer({"send": specs is not None})

    async def submit(self, request: Request) -> Response:
        worker_id, number = request.path_params["worker_id"], request.path_params["number"]
        submission, specs = self._offered.get(worker_id, (None, ()))
        if submission is None or submission.number != number:
            raise StateMismatch(f"{worker_id}, submission {number}: not offered; describe it first")

        def check_head(head: Any) -> None:
            if _submission_in(head) != submission:
                raise ConfigurationError("the frame's head describes another submission than the one that was offered")

        def finish(arrived: SpooledTensors) -> None:
            self._coordinator.accept(submission, arrived)

        return await self._receive(request, specs, check_head, finish)

    async def result(self, request: Request) -> Response:
        worker_id, number = request.path_params["worker_id"], request.path_params["number"]
        try:
            wait = min(max(float(request.query_params.get("wait", "0")), 0.0), LONGEST_WAIT)
        except ValueError:
            raise ConfigurationError("wait: a number of seconds") from None
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            rung = self._bell.next()
            result = await off_loop(partial(self._coordinator.result, worker_id, number))
            left = end - loop.time()
            if result is not None or left <= 0 or self._stopping.is_set():
                return Answer({"result": result})
            await first_of(rung.wait(), self._stopping.wait(), timeout=left)

    async def _receive(
        self,
        request: Request,
        specs: Specs,
        check_head: Callable[[Any], object],
        finish: Callable[[SpooledTensors], object],
    ) -> Response:
        """Write the tensors of a frame to a file, call ``finish`` with it, and answer."""
        least, most = length_limits(specs)
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or not least <= int(length) <= most:
            raise ConfigurationError(f"Content-Length: {length or 'missing'}; expected is {least} to {most}")
        body = _Body(request)

        def receive() -> None:
            try:
                frame = FrameReader(body.read_into, specs, length=int(length))
                check_head(frame.head)
                with self._coordinator.spooled(specs, frame) as arrived:
                    finish(arrived)
            except ConnectionError:
                raise ConfigurationError("the frame is incomplete: the connection was cut") from None

        await off_loop(receive)
        return Answer({})


async def _worker_id_in(request: Request) -> str:
    worker_id: str = check((await read_json(request)).get("worker_id"), WorkerId, "worker_id", ConfigurationError)
    return worker_id


def _submission_in(content: Any) -> Submission:
    submission: Submission = check(content, Submission, "submission", ConfigurationError)
    return submission


class _Body:
    """A request's body, which a thread reads into its own memory. Its pieces are copied there by the event loop."""

    def __init__(self, request: Request) -> None:
        self._pieces = request.stream()
        self._piece = memoryview(b"")
        self._loop = asyncio.get_running_loop()

    def read_into(self, memory: memoryview) -> None:
        """Fill ``memory`` with the next bytes. Not on the event loop's thread."""
        filling = self._fill(memory)
        try:
            asyncio.run_coroutine_threadsafe(filling, self._loop).result()
        except (ClientDisconnect, StopAsyncIteration, concurrent.futures.CancelledError):
            raise ConnectionError("the connection was cut") from None
        except RuntimeError:  # the loop is closed: the server has ended
            filling.close()
            raise ConnectionError("the server has ended") from None

    async def _fill(self, memory: memoryview) -> None:
        while len(memory):
            if not self._piece:
                self._piece = memoryview(await anext(self._pieces))
            count = min(len(memory), len(self._piece))
            memory[:count] = self._piece[:count]
            memory, self._piece = memory[count:], self._piece[count:]


class _FileAnswer(Response):
    """A file as the body. It may be written meanwhile. Closes the file; deleting it does not matter.

    uvicorn ignores what is sent to a client that is gone, so without a look between the pieces, the rest of the file
    would be read for nobody, and no other request would be answered meanwhile.
    """

    def __init__(self, file: FileIO, growth: Growth) -> None:
        self._file = file
        self._growth = growth
        headers = {"Content-Length": str(growth.length), "Cache-Control": "no-store"}
        super().__init__(headers=headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file as file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            begin, length = 0, 0 if scope["method"] == "HEAD" else self._growth.length
            request = Request(scope, receive)
            while begin < length:
                if await request.is_disconnected():
                    return
                piece = os.pread(file.fileno(), min(_PIECE, await self._growth.beyond(begin) - begin), begin)
                if not piece:
                    raise EOFError("the file was truncated while it was sent")
                begin += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
