"""ServerThread: answers HTTP on a daemon thread with an event loop of its own.

Nothing that happens here ends the program: the socket is bound before the thread starts, and what fails on the thread
is logged once. A forked process, such as a data loader's worker, lets go of the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from dalsegno.system.imports import require_extra

from .security import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from .connections import Connections

logger = logging.getLogger("dalsegno")

PORTS = range(8900, 9000)  # ports that are tried, if none is given
_JOIN = 0.9  # seconds that stop() waits for the thread
_NEEDED = ("starlette", "uvicorn", "prometheus_client")


def is_installed() -> bool:
    """Whether the libraries of the extra ``control``, or ``diloco``, are there."""
    return all(importlib.util.find_spec(name) for name in _NEEDED)


def check_installed() -> None:
    """Raises ConfigurationError if a library of the extra ``control`` is missing."""
    for name in _NEEDED:
        require_extra("control", name, "a server")


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on ``port``, or on the first free one of :data:`PORTS`.

    The port is taken once this returns: no other program can get it. Raises OSError if ``port``, or all of them, are in
    use, or the host is not of this machine.
    """
    for number in PORTS if port is None else [port]:
        try:
            return _listen(host, number)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port is not None:
                raise OSError(error.errno, f"{host}, port {number}: {error.strerror or error}") from error
    raise OSError(errno.EADDRINUSE, f"{host}: the ports {PORTS[0]} to {PORTS[-1]} are all in use")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite closed connections of a former job
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class ServerThread:
    """A server, from :meth:`start` to :meth:`stop`.

    Args:
        listener: a listening socket, which the server closes.
        build_app: called on the server's thread with an event that is set when the server is about to end.
        limits: on its connections; None: those for short requests.
        on_failure: called on the server's thread if the server ends by an error; None: the error is logged.
    """

    def __init__(
        self,
        listener: socket.socket,
        build_app: Callable[[asyncio.Event], ASGIApp],
        *,
        name: str,
        tls: ssl.SSLContext | None,
        limits: Limits | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._listener = listener
        self._build_app = build_app
        self._tls = tls
        self._limits = limits or DEFAULT_LIMITS
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._limits.write_timeout))
        self._on_failure = on_failure
        self._connections: Connections | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start answering. Clients that connect before the thread is ready wait in the listener's queue."""
        _running.add(self)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._thread.join()

    def stop(self) -> None:
        """Answer what has been asked, and end. Takes less than a second, whatever the clients do."""
        self._is_stopping.set()
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stopping.set)
        self._thread.join(_JOIN)
        _running.discard(self)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._is_stopping.is_set():
                pass
            elif self._on_failure is not None:
                self._on_failure(error)
            else:
                logger.error("the server ended: %s: %s", type(error).__name__, error)
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        from .connections import Connections

        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_note)
        self._loop, self._stopping = loop, stopping
        if self._is_stopping.is_set():  # before there was a loop to be notified
            return
        self._connections = Connections(self._build_app(stopping), self._tls, self._limits)
        await self._connections.serve(self._listener, stopping)

    def _detach_in_child(self, null: int) -> None:
        """In a forked process: make this copy of each socket a copy of ``null``, so that only the parent answers.

        The descriptors' numbers stay taken, so no object that still refers to one can close another file.
        """
        connections = self._connections
        for each in [self._listener, *([connections.listener, *connections.sockets()] if connections else [])]:
            with contextlib.suppress(OSError):
                if each is not None and each.fileno() >= 0:
                    os.dup2(null, each.fileno(), inheritable=False)


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Connections that break are normal, and of no concern to the program."""
    logger.debug("HTTP server: %s: %r", context.get("message"), context.get("exception"))


_running: weakref.WeakSet[ServerThread] = weakref.WeakSet()


def _detach_in_child() -> None:
    if _running:
        null = os.open(os.devnull, os.O_RDWR)
        for server in list(_running):
            server._detach_in_child(null)
        os.close(null)
        _running.clear()


os.register_at_fork(after_in_child=_detach_in_child)
