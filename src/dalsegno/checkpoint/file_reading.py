"""Reading a checkpoint's files: opening them, JSON, headers of tensors, checksums. Needs no torch."""

from __future__ import annotations

import errno
import heapq
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dalsegno.errors import DamagedCheckpoint
from dalsegno.system.machine import run_on_threads, thread_count

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)  # missing, or not a regular file


class FileRecord(NamedTuple):
    """``size`` in bytes and hexadecimal xxh3-128 of a file. A tuple: there are tens of thousands, which are sent."""

    size: int
    xxh3: str


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Descriptor of the regular file at ``path``, for reading; an OSError while the file is read names it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise DamagedCheckpoint(f"{path}: cannot be opened ({error.strerror})") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedCheckpoint(f"{path}: is not a regular file")
        with naming(path):
            yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file, such as that of a read from a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_bytes(path: Path) -> bytes:
    with opened(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as stream:
        return stream.read()


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), path)


def parse_json(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: is not JSON as dalsegno writes it ({error})") from error


def verify_files(directory: Path, names: Iterable[str], expected: FileRecord) -> None:
    """Compare the files ``names`` of the checkpoint in ``directory`` with their common record; a file of several names
    is read once."""
    verified = set()
    for name in names:
        path = directory / name
        if path.parent != directory and path.parent.is_symlink():
            raise DamagedCheckpoint(f"{path.parent}: is a symbolic link")
        with opened(path) as descriptor:
            status = os.fstat(descriptor)
            if status.st_size != expected.size:
                raise DamagedCheckpoint(f"{path}: has {status.st_size} bytes, the manifest records {expected.size}")
            if (file := (status.st_dev, status.st_ino)) in verified:
                continue
            if (found := checksum_of_file(descriptor, expected.size)) != expected.xxh3:
                raise DamagedCheckpoint(f"{path}: has checksum {found}, the manifest records {expected.xxh3}")
            verified.add(file)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


METADATA = "__metadata__"
"""Entry of a header that is not a tensor; safetensors reserves the name."""

_LARGEST = 100_000_000  # bytes; the limit of other safetensors readers too


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in a file, unchecked but for ``span``: its first byte in the file, and the byte after its last."""

    kind: Any
    shape: Any
    span: tuple[int, int]
    offsets: tuple[Any, ...] | None
    """Of its first element in the full tensor; None for a full tensor."""


def read_header(path: Path, descriptor: int) -> Mapping[str, HeaderEntry]:
    """Header of the open file at ``path``, by the tensors' names."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(_read(path, descriptor, 0, 8), "little")
    if length > size - 8:
        raise DamagedCheckpoint(f"{path}: its header is truncated")
    if length > _LARGEST:
        raise DamagedCheckpoint(f"{path}: its header is larger than safetensors allows")
    begin = 8 + length
    try:
        header = json.loads(_read(path, descriptor, 8, length))
        parts = _parts((header.pop(METADATA, None) or {}).get("parts"))
        entries = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not all(type(each) is int and 0 <= each < 1 << 48 for each in (first, last)):
                raise DamagedCheckpoint(f"{path}: its header has invalid data_offsets")
            offsets = tuple(parts[name]["offsets"]) if name in parts else None
            span = (begin + first, begin + last)
            entries[name] = HeaderEntry(entry.get("dtype"), entry.get("shape"), span, offsets)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header is not a safetensors header ({error!r})") from error
    return entries


def _parts(text: Any) -> Mapping[str, Any]:
    """The description that dalsegno writes of the boxes in a file; empty if ``parts`` is another program's."""
    try:
        parts = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return parts if isinstance(parts, dict) else {}


def _read(path: Path, descriptor: int, begin: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(descriptor, length, begin)
        if not part:
            raise DamagedCheckpoint(f"{path}: was truncated while it was read")
        parts.append(part)
        begin, length = begin + len(part), length - len(part)
    return b"".join(parts)


_PIECE = 2 << 20  # bytes read at once: still in the processor's cache; from a cold disk, twice as fast as 1 MB


def checksum_of_file(descriptor: int, length: int) -> str:
    """Hexadecimal xxh3-128 of the first ``length`` bytes of an open file, which several threads read in turn; of fewer
    if it ends before."""
    checksum, begins, turn = xxhash.xxh3_128(), iter(range(0, length, _PIECE)), threading.Condition()
    hashed, has_failed = 0, False

    def read(_: int) -> None:
        nonlocal hashed, has_failed
        memory = memoryview(bytearray(min(_PIECE, length)))
        try:
            for begin in begins:  # each thread takes the next one
                piece, count = memory[: length - begin], 0
                while count < len(piece) and (more := os.preadv(descriptor, [piece[count:]], begin + count)):
                    count += more
                with turn:
                    while hashed < begin and not has_failed:
                        turn.wait()
                    if has_failed:
                        return
                    checksum.update(piece[:count])
                    hashed = begin + _PIECE
                    turn.notify_all()
        except BaseException:
            with turn:
                has_failed = True
                turn.notify_all()
            raise

    run_on_threads(read, min(thread_count(), -(-length // _PIECE)), "dalsegno-checksum")
    return checksum.hexdigest()


def share_of_rank(files: Mapping[str, FileRecord], rank: int, world_size: int) -> list[str]:
    """Files that ``rank`` verifies: each content, the largest first, goes to the rank with the fewest bytes so far. A
    checksum covers a whole file: if fewer ranks saved than load, some have nothing to read."""
    loads = [(0, each) for each in range(world_size)]
    readers: dict[FileRecord, int] = {}
    largest_first = sorted(files, key=lambda name: -files[name].size)
    for name in largest_first:
        if files[name] not in readers:
            load, readers[files[name]] = heapq.heappop(loads)
            heapq.heappush(loads, (load + files[name].size, readers[files[name]]))
    return [name for name in largest_first if readers[files[name]] == rank]
