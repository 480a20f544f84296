"""Uploads: large bodies of requests, received past the HTTP parser into the memory of the handler.

The parser copies each of a body's bytes several times, in small pieces. A body whose length is known needs no parser:
a handler's thread asks for so many bytes, which the event loop receives from the socket, or from TLS, into its memory.
Meanwhile, and while the thread works on them, the system's buffers take what the client sends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

UPLOADS = "dalsegno.uploads"
"""Key in a scope's ``extensions``: a function that returns the upload of the request's body."""


class Upload(asyncio.BufferedProtocol):
    """The body of a request. From now on the protocol of its connection, which closes after the answer.

    Args:
        connection: the protocol of the connection otherwise.
        transport: of the connection.
        received: bytes of the body that the parser has received.
        moved: called whenever bytes have arrived, and when the upload waits for more, or no longer does.
    """

    def __init__(
        self,
        connection: asyncio.Protocol,
        transport: asyncio.Transport,
        received: bytes,
        moved: Callable[[], object],
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._received = memoryview(received)
        self._moved = moved
        self._loop = asyncio.get_running_loop()
        self._wanted: memoryview | None = None  # the rest of the memory to fill
        self._is_cut = False
        self._is_filled = False
        self._ended = threading.Event()  # the memory is filled, or will not be
        transport.pause_reading()
        transport.set_protocol(self)

    @property
    def is_waiting(self) -> bool:
        """Whether there is room for bytes that the client has yet to send."""
        return self._wanted is not None

    def read_into(self, memory: memoryview) -> None:
        """Fill ``memory`` with the next bytes of the body. On one thread, which is not the event loop's.

        Raises:
            ConnectionError: if the client does not send them.
        """
        count = min(len(memory), len(self._received))
        memory[:count] = self._received[:count]
        self._received = self._received[count:]
        if count == len(memory):
            return
        self._is_filled = False
        self._ended.clear()
        if self._is_cut:  # asked after clear(): a later cut sets the event again
            raise ConnectionError("the connection was cut")
        try:
            self._loop.call_soon_threadsafe(self._want, memory[count:])
        except RuntimeError:  # the loop is closed: the server has ended
            raise ConnectionError("the server has ended") from None
        self._ended.wait()
        if not self._is_filled:
            raise ConnectionError("the connection was cut")

    def _want(self, memory: memoryview) -> None:
        self._wanted = memory
        if self._is_cut:
            self._ended.set()
        else:
            self._transport.resume_reading()
            self._moved()

    # -- called by asyncio ------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._wanted is not None, "reading is paused"
        return self._wanted

    def buffer_updated(self, nbytes: int) -> None:
        assert self._wanted is not None, "reading is paused"
        self._wanted = self._wanted[nbytes:]
        if not self._wanted:
            self._wanted = None
            self._is_filled = True
            self._transport.pause_reading()
            self._ended.set()
        self._moved()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_cut = True
        self._ended.set()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
