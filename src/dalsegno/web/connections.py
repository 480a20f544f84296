"""Connections: those of a stock uvicorn server, bounded in number and in the time for which they wait for their client.

When all places are taken, the connection that has been waiting longest for its client makes room for a new one: slow
clients cannot keep others out. Connections that uvicorn does not count, which are in a TLS handshake or being closed,
have as many places more, so that nobody can use up the descriptors of the process that trains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

from .security import HEADER_BYTES, Limits

KEEP_ALIVE = 8
"""Seconds for which a connection stays open after an answer."""

_DRAIN = 0.3  # seconds that the end of the server waits for answers in progress
_SWEEP = 0.5  # seconds between two looks for connections that have waited too long
_BACKLOG = 64

Message = MutableMapping[str, Any]
Client = tuple[str, int]

logger = logging.getLogger("dalsegno")


class Connections:
    """Serves ``app`` on one listener."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._busy: set[Client] = set()  # connections with a request in progress, by the client's address
        self._waiting_since: dict[Client, float] = {}  # the others
        self.listener: _Listener | None = None
        config = Config(
            self._answer,
            interface="asgi3",
            http=cast(Any, self._connect),  # uvicorn calls it for each connection
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=cast(int, _DRAIN),  # handed to asyncio, which takes fractions
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server = Server(config)

    async def serve(self, listener: socket.socket, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``; then wait a moment for the answers in progress, and close all connections."""
        loop = asyncio.get_running_loop()
        own = self.listener = _Listener(listener, self)
        beside = [loop.create_task(stopping.wait()), loop.create_task(self._sweep())]
        try:
            with _uvicorn_is_silent():
                serving = loop.create_task(self._server.serve([own]))
                await asyncio.wait([serving, beside[0]], return_when=asyncio.FIRST_COMPLETED)
                self._server.should_exit = True
                try:
                    await serving
                except Exception:
                    await self._server.lifespan.shutdown()  # else it is cancelled with the loop, and says so
                    raise
        finally:
            own.close()
            for task in beside:
                task.cancel()
            for each in self._open():
                each.transport.abort()
            await asyncio.sleep(0)  # the transports close their sockets in the next round of the loop

    def sockets(self) -> list[socket.socket]:
        """Sockets of the connections, whatever their state."""
        return [] if self.listener is None else [each for each in self.listener.accepted if each.fileno() >= 0]

    def make_room(self, accepted: list[socket.socket]) -> None:
        """Close the oldest connection of those that uvicorn does not count, if they have taken all their places."""
        counted = {each.transport.get_extra_info("socket").fileno() for each in self._open()}
        others = [each for each in accepted if each.fileno() not in counted]
        for each in others[: max(0, len(others) - self._limits.connections)]:
            with suppress(OSError):  # the client is gone
                each.shutdown(socket.SHUT_RDWR)  # asyncio closes it then

    def _open(self) -> list[H11Protocol]:
        connections = cast(set[H11Protocol], self._server.server_state.connections)
        return [each for each in connections if not each.transport.is_closing()]

    def _connect(self, **given: Any) -> asyncio.Protocol:
        """Return what speaks HTTP on a new connection. ``given``: uvicorn's arguments."""
        if len(self._open()) >= self._limits.connections:
            waiting = self._waiting()
            if not waiting:
                return _Refusal()
            waiting[0].transport.abort()
        return H11Protocol(**given)

    def _waiting(self, seconds: float = 0.0) -> list[H11Protocol]:
        """The connections that wait for a request, for at least so many seconds; the longest first."""
        now = monotonic()
        since = {each: self._waiting_since.get(each.client or ("", 0), now) for each in self._open()}
        waiting = {each: begun for each, begun in since.items() if each.client not in self._busy}
        self._waiting_since = {each.client: begun for each, begun in waiting.items() if each.client is not None}
        return sorted((each for each in waiting if now - waiting[each] >= seconds), key=lambda each: waiting[each])

    async def _sweep(self) -> None:
        """Close connections that have waited too long for a request, or for its rest after its answer."""
        while True:
            for each in self._waiting(self._limits.request_timeout):
                each.transport.abort()
            await asyncio.sleep(_SWEEP)

    async def _answer(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Call the app. A body that does not arrive in time looks to it like a client that is gone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits, begun, is_complete = self._limits, monotonic(), False
        client = scope["client"]

        async def receive_in_time() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()
            left = limits.request_timeout - (0.0 if limits.large_bodies else monotonic() - begun)
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            is_complete = not message.get("more_body", False)
            return message

        self._busy.add(client)
        try:
            await self._app(scope, receive_in_time, send)
        except Exception:
            logger.exception("HTTP server: %s %s", scope["method"], scope["path"])
            raise
        finally:
            self._busy.discard(client)
            self._waiting_since[client] = monotonic()


class _Listener(socket.socket):
    """Takes the place of ``listener``, and knows the sockets that it has accepted."""

    def __init__(self, listener: socket.socket, connections: Connections) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self.setblocking(False)
        self.accepted: list[socket.socket] = []  # without those that are closed
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Any]:
        connection, client = super().accept()
        self.accepted = [*(each for each in self.accepted if each.fileno() >= 0), connection]
        self._connections.make_room(self.accepted)
        return connection, client


@contextmanager
def _uvicorn_is_silent() -> Iterator[None]:
    """Drop what uvicorn logs on this thread, such as a warning of each malformed request. Its options for this would
    also silence other servers in this process, which are the user's."""
    own, loggers = threading.get_ident(), [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access")]

    def is_of_others(record: logging.LogRecord) -> bool:
        return threading.get_ident() != own

    for each in loggers:
        each.addFilter(is_of_others)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_of_others)


class _Refusal(asyncio.Protocol):
    """Closes a connection for which there is no room."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.abort()
