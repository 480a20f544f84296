"""The checksum of a file, which several threads read and hash in turns."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from dalsegno.checkpoint import file_reading
from dalsegno.checkpoint.file_reading import checksum_of_file

PIECE = 100


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(file_reading, "_PIECE", PIECE)
    monkeypatch.setattr(file_reading, "thread_count", lambda: request.param)
    return int(request.param)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Of a file of 1,010 bytes."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1010))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE, 1010])
def test_it_is_the_checksum_of_the_bytes(descriptor: int, threads: int, length: int) -> None:
    for _ in range(20):  # threads come in another order each time
        assert checksum_of_file(descriptor, length) == xxhash.xxh3_128_hexdigest(os.pread(descriptor, length, 0))


def test_a_file_that_has_become_shorter_has_another_one(descriptor: int, threads: int) -> None:
    assert checksum_of_file(descriptor, 2000) == xxhash.xxh3_128_hexdigest(os.pread(descriptor, 1010, 0))


def test_pieces_that_come_in_parts(descriptor: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network disk may return them."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:30]], at))
    assert checksum_of_file(descriptor, 1010) == xxhash.xxh3_128_hexdigest(os.pread(descriptor, 1010, 0))


def test_a_piece_that_cannot_be_read_ends_all_threads(
    descriptor: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, read = os.preadv, []

    def bad(file: int, buffers: list[memoryview], at: int) -> int:
        read.append(at)
        if at == 3 * PIECE:
            raise OSError(errno.EIO, "bad disk")
        return preadv(file, buffers, at)

    monkeypatch.setattr(os, "preadv", bad)
    with pytest.raises(OSError, match="bad disk"):
        checksum_of_file(descriptor, 1010)
    assert len(read) <= 3 + threads
    assert not [each for each in threading.enumerate() if each.name.startswith("dalsegno-checksum")]


def test_a_piece_is_read_while_another_one_waits_for_its_turn(
    descriptor: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece comes only when as many others as there are other threads have been read."""
    preadv, are_read = os.preadv, threading.Semaphore(0)

    def slow(file: int, buffers: list[memoryview], at: int) -> int:
        if at == 0:
            assert all(are_read.acquire(timeout=30) for _ in range(threads - 1))
        are_read.release()
        return preadv(file, buffers, at)

    monkeypatch.setattr(os, "preadv", slow)
    assert checksum_of_file(descriptor, 1010) == xxhash.xxh3_128_hexdigest(os.pread(descriptor, 1010, 0))
