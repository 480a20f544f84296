"""Connections: those of a stock uvicorn server, bounded in number and in the time for which they wait for their client.

When all places are taken, the connection that has been waiting longest for its client makes room for a new one, also
one in a TLS handshake: slow clients cannot keep others out, nor use up the descriptors of the process that trains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import Server

from .security import HEADER_BYTES, REFUSALS, Limits

KEEP_ALIVE = 8  # seconds for which a connection stays open after an answer
_DRAIN = 0.3  # seconds that the end of the server waits for answers in progress
_SWEEP = 0.5  # seconds between two looks for connections that have waited too long
_BACKLOG = 64
_PIECE = 1 << 16  # bytes of an answer that a client must read in time

Message = MutableMapping[str, Any]

logger = logging.getLogger("dalsegno")


@dataclass(slots=True)
class _Connection:
    """An accepted connection.

    ``waiting_since``: for a request, or for its client to read; infinity while an answer is made. ``patience``: seconds
    that it may wait.
    """

    socket: socket.socket
    patience: float
    waiting_since: float = field(default_factory=monotonic)
    is_closing: bool = False

    def wait(self, patience: float) -> None:
        self.waiting_since, self.patience = monotonic(), patience

    def close(self) -> None:
        self.is_closing = True
        with suppress(OSError):  # the client is gone
            self.socket.shutdown(socket.SHUT_RDWR)  # asyncio closes it then


class Connections:
    """Serves ``app`` on one listener."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._accepted: dict[tuple[str, int], _Connection] = {}  # by the client's address
        self.listener: _Listener | None = None
        config = Config(
            self._answer,
            interface="asgi3",
            http="h11",
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=cast(int, _DRAIN),  # handed to asyncio, which takes fractions
            h11_max_incomplete_event_size=4 * HEADER_BYTES,  # up to this the gate sees it, and answers 431
        )
        config.load()
        config.ssl = tls
        self._server = Server(config)

    async def serve(self, listener: socket.socket, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``; then wait a moment for the answers in progress, and close all connections."""
        own = self.listener = _Listener(listener, self._admit)
        beside = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._sweep())]
        try:
            with _uvicorn_is_silent():
                serving = asyncio.create_task(self._server.serve([own]))
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
                each.close()
            for _ in range(3):  # rounds of the loop in which the transports notice it, and close their sockets
                await asyncio.sleep(0)

    def sockets(self) -> list[socket.socket]:
        """Sockets of the connections, whatever their state."""
        return [each.socket for each in self._accepted.values() if each.socket.fileno() >= 0]

    def _admit(self, accepted: socket.socket, client: tuple[str, int]) -> None:
        """If all places are taken, close the connection that has been waiting longest; the new one, if none other is
        waiting."""
        self._accepted = {who: each for who, each in self._accepted.items() if each.socket.fileno() >= 0}
        self._accepted[client] = _Connection(accepted, self._limits.request_timeout)
        if len(self._open()) > self._limits.connections:
            min(self._open(), key=lambda each: each.waiting_since).close()

    def _open(self) -> list[_Connection]:
        return [each for each in self._accepted.values() if each.socket.fileno() >= 0 and not each.is_closing]

    async def _sweep(self) -> None:
        """Close connections that have waited too long: for a request, for its rest after its answer, for a reader."""
        while True:
            for each in self._open():
                if each.waiting_since <= monotonic() - each.patience:
                    each.close()
            await asyncio.sleep(_SWEEP)

    async def _answer(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Call the app. A body that does not arrive in time looks to it like a client that is gone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = self._accepted.get(scope["client"])
        if connection is None:  # the client is gone
            return
        limits, begun, is_complete = self._limits, monotonic(), False

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

        async def send_in_time(message: Message) -> None:
            connection.wait(limits.write_timeout)
            if message.get("status") in REFUSALS:
                await asyncio.sleep(limits.refusal_pause)  # its place is free for others meanwhile
            for piece in _pieces(message):
                connection.wait(limits.write_timeout)
                await send(piece)
            connection.waiting_since = inf

        connection.waiting_since = inf
        try:
            await self._app(scope, receive_in_time, send_in_time)
        except Exception:
            logger.exception("HTTP server: %s %s", scope["method"], scope["path"])
            raise
        finally:
            connection.wait(limits.request_timeout)


def _pieces(message: Message) -> Iterator[Message]:
    """The message, with a long body in several: uvicorn waits before each until the client has read those before."""
    body, begin = message.get("body", b""), 0
    while len(body) - begin > _PIECE:
        yield {**message, "body": body[begin : begin + _PIECE], "more_body": True}
        begin += _PIECE
    yield {**message, "body": body[begin:]} if begin else message


class _Listener(socket.socket):
    """Takes the place of ``listener``, and calls ``admit`` with each socket that it has accepted, and its client."""

    def __init__(self, listener: socket.socket, admit: Callable[[socket.socket, tuple[str, int]], None]) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self.setblocking(False)
        self._admit = admit

    def accept(self) -> tuple[socket.socket, Any]:
        connection, client = super().accept()
        self._admit(connection, client[:2])
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
