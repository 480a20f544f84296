"""Downloads: large files as answers, sent by the kernel from its page cache, past the HTTP parser.

Over TLS, which encrypts in this process, the file is read in pieces.
"""

from __future__ import annotations

import asyncio
import os
from io import FileIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DOWNLOADS = "dalsegno.downloads"
"""Key in a scope's ``extensions``: a function that sends a file, whose length it is given, as the body of an answer."""

PIECE = 1 << 20
"""Bytes that are read at a time."""

_PART = 1 << 18  # bytes that a client must take within the time for an answer: a slow one must be able to


class FileAnswer(Response):
    """A file as the body. Closes the file.

    Args:
        file: an open file; deleting it does not matter.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._length = os.fstat(file.fileno()).st_size
        headers = {"Content-Length": str(self._length), "Cache-Control": "no-store"}
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
            await download(file, self._length)
            return
        while piece := file.read(PIECE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def send_file(transport: asyncio.Transport, file: FileIO, length: int, timeout: float) -> bool:
    """Send a file. Returns whether it was sent: if the client does not take ``_PART`` bytes within ``timeout`` seconds,
    or is gone, the connection is closed."""
    loop = asyncio.get_running_loop()
    try:
        for begin in range(0, length, _PART):
            part = min(_PART, length - begin)
            if await asyncio.wait_for(loop.sendfile(transport, file, begin, part, fallback=False), timeout) < part:
                raise EOFError("the file was truncated while it was sent")
    except (OSError, TimeoutError, EOFError, RuntimeError):  # RuntimeError: the transport is closing
        transport.abort()
        await asyncio.sleep(0)  # the protocol is notified
        return False
    return True
