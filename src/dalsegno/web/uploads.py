"""Uploads: large bodies of requests, received into two large buffers past the HTTP parser.

The parser copies each of a body's bytes several times, in small pieces. A body whose length is known needs no parser:
while one buffer is filled from the socket, the handler uses the other one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

UPLOADS = "dalsegno.uploads"
"""Key in a scope's ``extensions``: a function that takes the length of the request's body, and returns its upload."""

PIECE = 2 << 20
"""Bytes of a buffer."""


class Upload(asyncio.BufferedProtocol):
    """The rest of a request's body. It is the protocol of the connection until the body is complete or cut.

    Args:
        connection: the protocol of the connection otherwise.
        transport: of the connection.
        received: bytes of the body that the parser has received.
        length: of the whole body.
        moved: called whenever bytes have arrived, and when the upload waits for more, or no longer does.
    """

    def __init__(
        self,
        connection: asyncio.Protocol,
        transport: asyncio.Transport,
        received: bytes,
        length: int,
        moved: Callable[[], object],
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._moved = moved
        self._first = received[:length]
        self._left = length - len(self._first)  # bytes to receive
        self._free = [bytearray(min(PIECE, self._left)) for _ in range(2)]
        self._filling: bytearray | None = None
        self._filled = 0  # bytes of that buffer
        self._full: list[memoryview] = []
        self._is_cut = False
        self._changed = asyncio.Event()
        if self._left:
            self._filling = self._free.pop()
            transport.set_protocol(self)

    @property
    def is_waiting(self) -> bool:
        """Whether there is room for bytes that the client has yet to send."""
        return self._filling is not None

    async def pieces(self) -> AsyncIterator[memoryview]:
        """The body. Each piece is overwritten once the next one is asked for.

        Raises:
            ConnectionError: if the client does not send all of it.
        """
        if self._first:
            yield memoryview(self._first)
        while self._full or self._left:
            if self._full:
                piece = self._full.pop(0)
                yield piece
                self._reuse(piece)
            elif self._is_cut:
                raise ConnectionError("the connection was cut")
            else:
                self._changed.clear()
                await self._changed.wait()

    def _reuse(self, piece: memoryview) -> None:
        assert isinstance(piece.obj, bytearray), "it is one of the buffers"
        self._free.append(piece.obj)
        if self._filling is None and self._left and not self._is_cut:
            self._fill_next()
            self._transport.resume_reading()
            self._moved()

    def _fill_next(self) -> None:
        self._filling, self._filled = self._free.pop(), 0

    # -- called by asyncio ------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._filling is not None, "reading is paused"
        return memoryview(self._filling)[self._filled : self._filled + self._left]

    def buffer_updated(self, nbytes: int) -> None:
        assert self._filling is not None, "reading is paused"
        self._filled += nbytes
        self._left -= nbytes
        if self._filled == len(self._filling) or not self._left:
            self._full.append(memoryview(self._filling)[: self._filled])
            self._filling = None
            self._changed.set()
            if not self._left:
                self._transport.set_protocol(self._connection)
            elif self._free:
                self._fill_next()
            else:
                self._transport.pause_reading()
        self._moved()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_cut = True
        self._changed.set()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
