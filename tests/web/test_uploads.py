"""A large body that a thread receives into its own memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import pytest

from dalsegno.web.uploads import Upload


@pytest.mark.parametrize("is_cut_first", [False, True])
def test_memory_that_a_cut_connection_leaves_as_it_was_is_not_taken_for_filled(is_cut_first: bool) -> None:
    """Wherever the cut falls: also between the request for bytes and the event loop's turn."""

    async def receive() -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport = cast(asyncio.Transport, (await loop.create_connection(asyncio.Protocol, sock=ours))[0])
        upload = Upload(asyncio.Protocol(), transport, b"", lambda: None)

        class Loop:
            def call_soon_threadsafe(self, call: Callable[..., object], *arguments: object) -> None:
                upload.connection_lost(None)

        if is_cut_first:
            upload.connection_lost(None)
        upload._loop = cast(asyncio.AbstractEventLoop, Loop())
        with pytest.raises(ConnectionError):
            upload.read_into(memoryview(bytearray(8)))
        transport.abort()
        theirs.close()

    asyncio.run(receive())
