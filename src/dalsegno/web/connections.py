"""Connections: the open connections of a server, bounded in number and time. uvicorn speaks HTTP on them.

A client that sends slowly, or does not read what it asked for, is cut off. When all places are taken, the connection
that has been waiting longest for its client makes room for a new one; so slow clients cannot keep others out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from dataclasses import dataclass
from io import FileIO
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .downloads import DOWNLOADS, send_file
from .growth import Growth
from .uploads import UPLOADS, Upload

KEEP_ALIVE = 8
"""Seconds for which a connection without a request stays open. Below :attr:`Limits.request_timeout`, which closes
abruptly."""

HEADER_BYTES = 1 << 14
"""Size of a request's line and headers."""

_RETRY = 0.1  # seconds between two attempts to accept, if the process has no descriptor left
_FLUSH = 0.1  # seconds for which closed connections may send what is in their buffers

_logger = logging.getLogger("dalsegno.control")
_logger.setLevel(logging.ERROR)  # uvicorn warns of each malformed request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a server's connections. The defaults suit short requests."""

    connections: int = 64
    """Connections at a time."""
    request_timeout: float = 10.0
    """Seconds for a TLS handshake, and for a request to arrive."""
    large_bodies: bool = False
    """Restart the time for a request with each part that arrives: its body may take long, but not stand still."""
    write_timeout: float = 20.0
    """Seconds for which a client may leave an answer unread, once the buffers of the system are full."""


DEFAULT_LIMITS = Limits()


class Connections:
    """Accepts connections from ``listener`` and serves ``app`` on them."""

    def __init__(
        self, listener: socket.socket, app: Any, tls: ssl.SSLContext | None, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._tls = tls
        self._open: dict[socket.socket, _Protocol | asyncio.Task[None]] = {}  # by arrival; a task: in its handshake
        self._state = ServerState()
        self._config = Config(
            app,
            http="h11",
            lifespan="off",
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        self._config.load()

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_RETRY)
                continue
            if len(self._open) >= self._limits.connections and not self._make_room():
                connection.close()
                continue
            connection.setblocking(False)
            self._open[connection] = loop.create_task(self._begin(connection))

    async def drain(self, timeout: float) -> None:
        """Wait for the answers in progress, at most ``timeout`` seconds, then close all connections."""
        while self._make_room():
            pass
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=timeout)
        for task in list(self._state.tasks):
            task.cancel()
        for each in list(self._open.values()):
            if isinstance(each, _Protocol):
                each.transport.close()
        end = time.monotonic() + _FLUSH
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for each in list(self._open.values()):
            if isinstance(each, _Protocol):
                each.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the next round of the loop

    def sockets(self) -> list[socket.socket]:
        """Sockets of the open connections."""
        return list(self._open)

    def _make_room(self) -> bool:
        """Close the connection that has been waiting longest for its client. False if none waits."""
        for connection, each in self._open.items():
            if isinstance(each, asyncio.Task):
                del self._open[connection]
                each.cancel()
                return True
            if each.is_waiting:
                del self._open[connection]
                each.transport.abort()
                return True
        return False

    async def _begin(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: _Protocol(self, connection),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._limits.request_timeout,
            )
        except (OSError, asyncio.CancelledError):  # the handshake failed
            self._open.pop(connection, None)
            connection.close()


class _Protocol(H11Protocol):
    """uvicorn's protocol with limits on time."""

    def __init__(self, connections: Connections, connection: socket.socket) -> None:
        super().__init__(connections._config, connections._state, {})
        self._limits = connections._limits
        self.logger = _logger
        self.access_log = False
        self._connections = connections
        self._connection = connection
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._upload: Upload | None = None
        self._app, self.app = self.app, self._answer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        is_plain = self._connections._tls is None
        scope["extensions"] = {UPLOADS: self.open_upload, DOWNLOADS: self.send_file if is_plain else None}
        await self._app(scope, receive, send)

    def open_upload(self) -> Upload:
        """Receive the body of the request in progress past the HTTP parser. The connection then closes: the answer
        needs the header ``Connection: close``."""
        received = bytes(self.cycle.body)
        self.cycle.body = bytearray()
        self.cycle.keep_alive = False
        self.flow.resume_reading()
        self._upload = Upload(self, self.transport, received, self._watch)
        self._watch()
        return self._upload

    async def send_file(self, file: FileIO, growth: Growth) -> None:
        """Send a file as the body of the answer that has begun. Closes the connection if the client is too slow."""
        if await send_file(self.transport, file, growth, self._limits.write_timeout):
            body: Any = range(growth.length)  # the parser only counts a body's bytes
            self.conn.send_with_data_passthrough(h11.Data(data=body))

    @property
    def is_waiting(self) -> bool:
        """Whether the client has yet to send a request, or the rest of one."""
        if self._upload is not None:
            return self._upload.is_waiting
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections._open[self._connection] = self
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections._open.pop(self._connection, None)
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:  # an answer is being sent already
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch(self) -> None:
        """Start the clock when the server begins to wait for a request; stop it when the request is complete."""
        if self._request_timer is not None and (self._limits.large_bodies or not self.is_waiting):
            self._request_timer.cancel()
            self._request_timer = None
        if self._request_timer is None and self.is_waiting:
            self._request_timer = self.loop.call_later(self._limits.request_timeout, self.transport.abort)
