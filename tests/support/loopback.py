"""A server on loopback that does not do its work."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self


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
