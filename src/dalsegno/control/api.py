"""API: the addresses that a job's server answers, as an ASGI application.

::

    GET  /jobs                                 jobs of this user on this machine
    GET  /jobs/ID/status                       step, epoch, last values of what was logged
    POST /jobs/ID/control[?wait=SECONDS]       {"command": NAME, "data": {…}, "by": WHO}; with wait: after its effect
    GET  /jobs/ID/commands/COMMAND_ID          what became of a command; also with wait
    GET  /jobs/ID/callbacks                    callbacks of the run
    GET  /jobs/ID/history                      legs, checkpoints and commands of the run
    GET  /jobs/ID/records?since=POSITION       records of the log
    GET  /jobs/ID/stream                       records and events, as server-sent events
    GET  /metrics                              OpenMetrics
    GET  /                                     the live page

Handlers run on the server's thread. Whatever may block (a disk, a wait) runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dalsegno.errors import ConfigurationError, NotFound, NotRunning, UnknownName
from dalsegno.logs.values import from_json
from dalsegno.web.answers import Answer, answer_error, first_of, off_loop, read_json, shorten
from dalsegno.web.security import Gate

from .commands import COMMANDS
from .feed import PLACE, LiveJob
from .jobs import list_jobs
from .queue import Ticket

LONGEST_WAIT = 600.0
"""Seconds that ``wait`` may ask for."""

MOST_STREAMS = 16
"""Streams at a time."""

_POLL = 0.25  # seconds between two reads of the log for a stream
_HEARTBEAT = 15.0  # seconds after which an idle stream sends a comment, so that a dead connection is noticed


def build_app(job: LiveJob, stopping: asyncio.Event, *, host: str, token: str | None) -> ASGIApp:
    """The application of one job. ``stopping``: set when the server is about to end."""
    api = _Api(job, stopping)
    here = "/jobs/{job_id}"
    routes = [
        Route("/", answer_page),
        Route("/metrics", api.metrics),
        Route("/jobs", api.jobs),
        Route(f"{here}/status", api.of_this_job(api.status)),
        Route(f"{here}/control", api.of_this_job(api.control), methods=["POST"]),
        Route(f"{here}/commands/{{command_id}}", api.of_this_job(api.command)),
        Route(f"{here}/callbacks", api.of_this_job(api.callbacks)),
        Route(f"{here}/history", api.of_this_job(api.history)),
        Route(f"{here}/records", api.of_this_job(api.records)),
        Route(f"{here}/stream", api.of_this_job(api.stream)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: answer_error})
    app.router.redirect_slashes = False
    return Gate(app, host=host, token=token, open_paths={"/"})


class _Api:
    def __init__(self, job: LiveJob, stopping: asyncio.Event) -> None:
        self._job = job
        self._stopping = stopping
        self._streams: set[_Stream] = set()  # those that are open

    def of_this_job(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if request.path_params["job_id"] != self._job.job_id:
                raise HTTPException(404, f"not this server's job; it is {self._job.job_id}")
            return await answer(request)

        return checked

    async def jobs(self, request: Request) -> Response:
        return Answer({"jobs": await off_loop(list_endpoints)}, headers={"Dalsegno-Job": self._job.job_id})

    async def status(self, request: Request) -> Response:
        return Answer(self._job.status())

    async def control(self, request: Request) -> Response:
        body = await read_json(request)
        wait = _wait(request)
        name, data = body.get("command"), body.get("data")
        data = {} if data is None else data
        if not isinstance(name, str) or (name != "status" and name not in COMMANDS):
            known = ["status", *COMMANDS]
            return Answer({"error": f"Unknown command: {shorten(name)}", "valid_commands": known}, 400)
        if not isinstance(data, dict):
            raise HTTPException(400, '"data" must be an object')
        acknowledged = {"status": "acknowledged", "command": name, "timestamp": time.time()}
        if name == "status":
            return Answer({**acknowledged, "message": "see data", "data": self._job.status()})
        by = body.get("by", f"HTTP client {request.client.host if request.client else '?'}")
        try:
            ticket = await off_loop(lambda: self._job.commands.submit(name, data, by=by))
        except NotRunning as error:
            raise HTTPException(409, str(error)) from error
        except (UnknownName, ConfigurationError) as error:
            raise HTTPException(400, str(error)) from error
        message = f"Command {name} queued for execution"
        return Answer({**acknowledged, "message": message, **await self._outcome(request, ticket, wait)})

    async def command(self, request: Request) -> Response:
        wait = _wait(request)
        try:
            ticket = self._job.commands.ticket(request.path_params["command_id"])
        except NotFound as error:
            raise HTTPException(404, str(error)) from error
        return Answer({"status": "acknowledged", **await self._outcome(request, ticket, wait)})

    async def callbacks(self, request: Request) -> Response:
        return Answer({"callbacks": self._job.callbacks()})

    async def history(self, request: Request) -> Response:
        return Answer(await off_loop(self._job.history))

    async def records(self, request: Request) -> Response:
        chunk = await off_loop(partial(self._job.records.after, request.query_params.get("since", "")))
        place = {"position": chunk.position, "reset": chunk.is_reset, "more": chunk.has_more}
        content = f'{{"records": [{", ".join(chunk.records)}], {json.dumps(place)[1:]}'
        return Response(content, media_type="application/json")

    async def stream(self, request: Request) -> Response:
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        if len(self._streams) >= MOST_STREAMS:
            raise HTTPException(429, f"{MOST_STREAMS} streams are open already; close one")
        stream = _Stream(self._messages(since), self._streams, headers)
        self._streams.add(stream)  # before the answer begins: others may be asked for meanwhile
        return stream

    async def metrics(self, request: Request) -> Response:
        return Response(open_metrics(self._job), media_type=CONTENT_TYPE_LATEST)

    async def _outcome(self, request: Request, ticket: Ticket, wait: float) -> dict[str, Any]:
        """What is known of a command, after its effect or after ``wait`` seconds; sooner, if the client is gone, or the
        server is about to end."""
        loop, resolved = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(resolved.set)

        if wait > 0 and ticket.wait(0) is None:
            ticket.when_resolved(notify)
            await first_of(resolved.wait(), self._stopping.wait(), _disconnect(request), timeout=wait)
        outcome = ticket.wait(0)
        if outcome is None:
            return {"id": ticket.id, "step": None, "error": None}
        status = "done" if outcome.error is None else "failed"
        return {"id": ticket.id, "status": status, "step": outcome.step, "error": outcome.error}

    async def _messages(self, since: str) -> AsyncIterator[str]:
        """The stream. Each message has as id the positions in the records and in the events that follow it."""
        record_position, _, event_position = since.partition("/")
        sent = time.monotonic()
        yield "retry: 1000\n\n"
        while True:
            is_last = self._stopping.is_set()
            events = self._job.events.after(event_position)
            chunk = await off_loop(partial(self._job.records.after, record_position))
            messages = [_message("reset", "{}")] if chunk.is_reset else []
            for position, record in zip(chunk.positions, chunk.records, strict=True):
                messages.append(_message("record", record, f"{position}/{event_position}"))
            record_position = chunk.position
            for position, event in zip(events.positions, events.records, strict=True):
                messages.append(_message("event", event, f"{record_position}/{position}"))
            event_position = events.position
            if is_last and not chunk.has_more:
                messages.append(_message("end", "{}"))
            if messages or time.monotonic() - sent > _HEARTBEAT:
                sent = time.monotonic()
                yield "".join(messages) or ":\n\n"
            if is_last and not chunk.has_more:
                return
            if not chunk.has_more:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _POLL)


class _Stream(StreamingResponse):
    """Server-sent events. Leaves ``streams`` at its end, also if the client is gone before the first event."""

    def __init__(self, messages: AsyncIterator[str], streams: set[_Stream], headers: Mapping[str, str]) -> None:
        super().__init__(messages, headers=headers, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.discard(self)


async def _disconnect(request: Request) -> bool:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return True


def list_endpoints() -> list[dict[str, Any]]:
    """The jobs of this user on this machine, each with its state; no tokens."""
    return [{**asdict(job.endpoint), "state": job.state} for job in list_jobs() if job.endpoint]


async def answer_page(request: Request) -> Response:
    """The live page. Its module is imported when a browser asks for it: most jobs are never looked at."""
    page: Response = await off_loop(lambda: import_module(".page", __package__).live_page())
    return page


def _wait(request: Request) -> float:
    """Seconds to wait for a command's effect."""
    try:
        seconds = float(request.query_params.get("wait", "0"))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_WAIT:
        raise HTTPException(400, f"wait: a number of seconds from 0 to {LONGEST_WAIT:.0f}")
    return seconds


def _message(kind: str, content: str, id: str | None = None) -> str:
    data = f"event: {kind}\ndata: {content}\n\n"
    return data if id is None else f"id: {id}\n{data}"


def open_metrics(job: LiveJob) -> bytes:
    """The metrics of ``job`` in the OpenMetrics text format."""
    text: bytes = generate_latest(_Status(job.status()))  # type: ignore[no-untyped-call]
    return text


class _Status(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield InfoMetricFamily("dalsegno_job", "The job.", value={"job_id": status["job_id"]})
        yield GaugeMetricFamily("dalsegno_global_step", "Finished optimizer steps.", value=status["global_step"])
        yield GaugeMetricFamily("dalsegno_epoch", "Passes over the data.", value=status["epoch"])
        yield GaugeMetricFamily("dalsegno_max_steps", "Steps at which the run ends; -1: unknown.", status["max_steps"])
        if status["logged_at"] is not None:
            yield GaugeMetricFamily(
                "dalsegno_logged_timestamp_seconds", "Time of the last log.", value=status["logged_at"]
            )
        logged = GaugeMetricFamily("dalsegno_logged", "Last value of everything that is logged.", labels=["name"])
        for name, value in status.items():
            number = from_json(value)
            if name not in PLACE and isinstance(number, (int, float)) and not isinstance(number, bool):
                logged.add_metric([name], _as_float(number))
        yield logged


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond all floats
        return float("inf") if number > 0 else float("-inf")
