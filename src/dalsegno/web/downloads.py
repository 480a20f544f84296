"""Downloads: large files as answers, sent by the kernel from its page cache, past the HTTP parser.

Over TLS, which encrypts in this process, the file is read in pieces. A file may be sent while it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from io import FileIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .growth import Growth

DOWNLOADS = "dalsegno.downloads"
"""Key in a scope's ``extensions``: a function that sends a file, whose growth it is given, as the body of an answer."""

PIECE = 1 << 20
"""Bytes that are read or sent at a time: other connections wait for no more."""

_FIRST = 1 << 12  # bytes that go through asyncio
_LOOKS = 8  # attempts to send within the time in which a client must take something


class FileAnswer(Response):
    """A file as the body. Closes the file.

    Args:
        file: an open file; deleting it does not matter.
        growth: of a file that is written meanwhile; None: it is complete.
    """

    def __init__(self, file: FileIO, growth: Growth | None = None) -> None:
        self._file = file
        self._growth = growth or Growth.complete(os.fstat(file.fileno()).st_size)
        headers = {"Content-Length": str(self._growth.length), "Cache-Control": "no-store"}
        super().__init__(headers=headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file as file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                await self._send_body(file, scope, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, file: FileIO, scope: Scope, send: Send) -> None:
        download = scope["extensions"].get(DOWNLOADS)
        if download is not None:
            await download(file, self._growth)
            return
        begin = 0
        while begin < self._growth.length:
            count = min(PIECE, await self._growth.beyond(begin) - begin)
            piece = os.pread(file.fileno(), count, begin)
            if not piece:
                raise EOFError("the file was truncated while it was sent")
            begin += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def send_file(transport: asyncio.Transport, file: FileIO, growth: Growth, timeout: float) -> bool:
    """Send a file. Returns whether it was sent: if the client takes nothing for ``timeout`` seconds, or is gone, or the
    file is not written to its end, the connection is closed."""
    loop = asyncio.get_running_loop()
    first = min(_FIRST, growth.length)
    try:
        if first:
            await growth.beyond(first - 1)
        # asyncio waits until what was written before is sent. It reports nothing before a part is sent completely, so
        # the time for a large part would be too short for a slow client, and small parts would slow down a fast one.
        if first and await asyncio.wait_for(loop.sendfile(transport, file, 0, first, fallback=False), timeout) < first:
            raise EOFError("the file was truncated while it was sent")
        if first < growth.length:
            await _send_rest(transport, file, first, growth, timeout)
    except (OSError, TimeoutError, EOFError, RuntimeError):  # RuntimeError: the transport is closing
        transport.abort()
        await asyncio.sleep(0)  # the protocol is notified
        return False
    return True


async def _send_rest(transport: asyncio.Transport, file: FileIO, begin: int, growth: Growth, timeout: float) -> None:
    """
    Raises:
        TimeoutError: if the client takes nothing for ``timeout`` seconds.
        OSError: if the client is gone.
        EOFError: if the file is too short, or is not written to its end.
    """
    loop = asyncio.get_running_loop()
    descriptor = os.dup(transport.get_extra_info("socket").fileno())  # asyncio watches the transport's own
    is_writable = asyncio.Event()
    loop.add_writer(descriptor, is_writable.set)
    try:
        taken, end = loop.time(), begin
        while begin < growth.length:
            if begin == end:
                end = await growth.beyond(begin)
                taken = loop.time()
            if transport.is_closing():
                raise ConnectionAbortedError("the connection is closed")
            is_writable.clear()
            try:
                count = os.sendfile(descriptor, file.fileno(), begin, min(PIECE, end - begin))
            except BlockingIOError:
                if loop.time() - taken > timeout:
                    raise TimeoutError("the client takes nothing") from None
                # Linux reports a socket as writable once a third of its buffer is free, which a slow client may not
                # achieve in time; some bytes can be sent before.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_writable.wait(), timeout / _LOOKS)
                continue
            if not count:
                raise EOFError("the file was truncated while it was sent")
            begin, taken = begin + count, loop.time()
            await asyncio.sleep(0)  # the turn of other connections
    finally:
        loop.remove_writer(descriptor)
        os.close(descriptor)
