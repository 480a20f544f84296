"""Files as answers, sent by the kernel."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from pathlib import Path
from typing import cast

import pytest

from dalsegno.web.downloads import send_file
from dalsegno.web.growth import Growth

SIZE = 9 << 20
"""More than is sent at a time, and than the system's buffers take."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


async def transport_of(ours: socket.socket) -> asyncio.Transport:
    return cast(asyncio.Transport, (await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours))[0])


async def sent_to_a_reader(path: Path, before: bytes = b"") -> tuple[bool, bytes]:
    """Whether the file was sent; and what arrived, with the bytes that were written before."""
    ours, theirs = socket.socketpair()
    transport = await transport_of(ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    transport.write(before)
    reading = asyncio.create_task(reader.readexactly(len(before) + SIZE))
    with path.open("rb", buffering=0) as file:
        is_sent = await send_file(transport, file, Growth.complete(SIZE), 60.0)
    received = await reading
    transport.close()
    writer.close()
    return is_sent, received


def test_a_file_arrives_after_what_was_written_before(path: Path) -> None:
    assert asyncio.run(sent_to_a_reader(path, b"head")) == (True, b"head" + path.read_bytes())


@pytest.mark.parametrize("goes", [False, True])
def test_a_client_that_does_not_read_is_cut_off(path: Path, goes: bool) -> None:
    async def send() -> tuple[bool, bool]:
        ours, theirs = socket.socketpair()
        transport = await transport_of(ours)
        if goes:
            theirs.close()
        with path.open("rb", buffering=0) as file:
            is_sent = await send_file(transport, file, Growth.complete(SIZE), 60.0 if goes else 0.1)
        theirs.close()
        return is_sent, transport.is_closing()

    assert asyncio.run(send()) == (False, True)


def test_a_client_that_reads_slowly_but_steadily_gets_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 16 KiB at a time; in between, nothing can be sent."""
    sendfile, calls = os.sendfile, itertools.count()

    def take(out: int, file: int, offset: int, count: int) -> int:
        if next(calls) % 2:
            raise BlockingIOError
        return sendfile(out, file, offset, min(count, 16 << 10))

    monkeypatch.setattr(os, "sendfile", take)
    assert asyncio.run(sent_to_a_reader(path)) == (True, path.read_bytes())
    assert next(calls) > 2 * SIZE // (16 << 10)


def test_a_connection_that_is_closed_meanwhile_gets_no_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes through a descriptor of its own, which closing the transport does not close."""
    calls = []

    async def send() -> bool:
        ours, theirs = socket.socketpair()
        transport = await transport_of(ours)

        def close(out: int, file: int, offset: int, count: int) -> int:
            calls.append(offset)
            if offset:
                transport.abort()
            return count

        monkeypatch.setattr(os, "sendfile", close)
        with path.open("rb", buffering=0) as file:
            is_sent = await send_file(transport, file, Growth.complete(SIZE), 60.0)
        theirs.close()
        return is_sent

    assert not asyncio.run(send())
    assert len(calls) == 2


def test_a_file_that_is_shorter_than_was_announced_ends_the_connection(path: Path) -> None:
    async def send() -> bool:
        ours, theirs = socket.socketpair()
        transport = await transport_of(ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        reading = asyncio.create_task(reader.read())
        with path.open("rb", buffering=0) as file:
            is_sent = await send_file(transport, file, Growth.complete(SIZE + 1), 60.0)
        await reading
        writer.close()
        return is_sent

    assert not asyncio.run(send())
