"""Ports on loopback: what the tests of other processes do not take, and a server that does not do its work."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from dalsegno.web import server


def begin_at_own_port() -> None:
    """Servers of this process, and of those forked from it, try other ports first than those of other workers.

    Else a port that a server has just left would be the next one's, and nobody would see that it is free.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) + 1
    begin = number * len(server.PORTS) // (int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) + 1)
    server.PORTS = [*server.PORTS[begin:], *server.PORTS[:begin]]  # type: ignore[assignment]


@contextmanager
def reserved_port() -> Iterator[int]:
    """One that servers get which ask for it, one after the other, and no other program: bound, but not listening."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class Loopback:
    """``refuses``: nothing listens. ``hangs``: accepts connections and never answers. ``answers 500``: to all."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))  # stays bound, so that no other process takes the port
        self.port: int = self._socket.getsockname()[1]
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        if self._fault != "refuses":
            self._socket.listen()
            threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        for each in self._held:
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            self._held.append(connection)
            if self._fault == "answers 500":
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 500 Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                connection.close()
