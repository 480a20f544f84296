"""Files: those of submissions, which arrive and are checked before they get a name, and those of versions of the
parameters, as workers fetch them.

A file that is no longer needed is overwritten by the next one: the disk and the page cache have room for it already.
128 MB take half the time of a new file, and nothing has to be deleted while workers wait.

A worker may fetch a version while it is written. Versions are not fsynced: the journal can make them again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import StoredFile
from dalsegno.diloco.wire.messages import FrameLayout, FrameReader, frame_pieces, head_of_whole_frame, in_file_order
from dalsegno.diloco.wire.signature import GROUP, Specs, TensorSpec, dequantize, element_count, file_layout
from dalsegno.errors import ConfigurationError, NotFound
from dalsegno.system import filesystem
from dalsegno.system.durability import NotDurable

from .outer import ALONE, BLOCK, GlobalModel

PIECE = 4 << 20
"""Bytes that are received, checked and written at a time. Each is handed over between two threads: with 1 MiB, a round
takes a quarter longer."""

_PARTIAL = ".partial"
_WRITE_BACK = 8 << 20
"""Bytes that are written before the disk is asked to begin with them."""


class SpareFiles:
    """Files of a directory that have no name yet, or no longer. Used on any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spare: deque[Path] = deque()
        self._own = uuid.uuid4().hex[:12]  # a server that was stopped may still write, in this process
        self._numbers = itertools.count()

    def take(self) -> Path:
        """The path of a file to overwrite; it may not exist yet."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_path()

    def give_back(self, path: Path) -> None:
        """Allow a file to be overwritten. After a power cut its name may be back, with any content."""
        spare = path
        if path.suffix != _PARTIAL:
            spare = self._new_path()
            filesystem.rename_nosync(path, spare)
            if spare.stat().st_nlink > 1:  # a copy by links, such as a backup, keeps its bytes
                filesystem.remove(spare)
                return
        self._spare.append(spare)

    def release(self, is_needed: Callable[[Path], object]) -> None:
        """Allow all files that have a name and are not needed to be overwritten."""
        for path in [each for each in self._directory.iterdir() if each.suffix != _PARTIAL]:
            if not is_needed(path):
                self.give_back(path)

    def delete_all(self) -> None:
        """Delete the files without a name, also those of a killed process. To be called while none is in use."""
        self._spare.clear()
        for path in self._directory.glob(f".*{_PARTIAL}"):
            filesystem.remove(path)

    def _new_path(self) -> Path:
        return self._directory / f".{self._own}-{next(self._numbers)}{_PARTIAL}"


class SpooledTensors:
    """Finite tensors in a file that has neither its name yet nor reached the disk. Made by :func:`spooled` only."""

    def __init__(self, path: Path, specs: Specs) -> None:
        self.path = path
        self.specs = specs
        self.descriptor = filesystem.open_own(path, os.O_WRONLY | os.O_CREAT)
        """Writes the file. Its fsync reports each error since it was opened; that of another descriptor may not."""
        self.is_kept = False
        """Whether the file has a name."""
        self._is_durable = False
        self._failure: OSError | None = None
        self._turn = threading.Lock()  # of the threads that wait for the disk

    def keep(self, path: Path) -> None:
        filesystem.rename_nosync(self.path, path)
        self.path = path
        self.is_kept = True

    def make_durable(self) -> None:
        """Wait until the file and its name are on disk, on any thread. Raises NotDurable if the disk refuses it, now or
        at an earlier call."""
        with self._turn:
            if not self._is_durable and self._failure is None:
                try:
                    filesystem.fsync(self.descriptor, self.path)
                    filesystem.fsync_directory(self.path.parent)
                    self._is_durable = True
                except OSError as error:
                    self._failure = error
            if self._failure is not None:
                raise NotDurable(self._failure.errno, f"fsync failed: {self._failure.strerror}", str(self.path))

    def close(self) -> None:
        with self._turn:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def spooled(files: SpareFiles, specs: Specs, frame: FrameReader) -> Iterator[SpooledTensors]:
    """Write tensors to a file of ``files``, which takes the file back at the end, unless it was kept. Raises
    ConfigurationError if a tensor has a NaN or an infinity."""
    tensors = SpooledTensors(files.take(), specs)
    try:
        try:
            _write(tensors, frame)
        except OSError:  # a full disk needs the room
            with suppress(OSError):
                filesystem.remove(tensors.path)
            raise
        yield tensors
    finally:
        tensors.close()
        if not tensors.is_kept:
            files.give_back(tensors.path)


def _write(tensors: SpooledTensors, frame: FrameReader) -> None:
    path, descriptor, specs = tensors.path, tensors.descriptor, tensors.specs
    layout = file_layout(specs)
    buffer = torch.empty(PIECE, dtype=torch.uint8).numpy()
    not_finite: str | None = None  # raised after the last byte: a client that still sends does not see the answer
    filesystem.write_all(descriptor, layout.header, path)
    end = done = len(layout.header)
    for spec in in_file_order(specs):
        for size, check in _sections(spec):
            for begin in range(0, size, PIECE):
                piece = buffer[: min(PIECE, size - begin)]
                frame.fill(piece.data)
                if not_finite is None and check is not None and not check(piece):
                    not_finite = spec.name
                if not_finite is not None:
                    continue
                filesystem.write_all(descriptor, piece.data, path)
                end += len(piece)
                if end - done >= _WRITE_BACK:
                    filesystem.start_writeback(descriptor, done, end - done)
                    done = end
    frame.end()
    if not_finite is not None:
        raise ConfigurationError(f"{not_finite} contains NaN or infinity; nothing of this submission is used")
    if os.fstat(descriptor).st_size != layout.length:
        filesystem.truncate(descriptor, layout.length, path)


def _sections(spec: TensorSpec) -> Sequence[tuple[int, Callable[[Any], bool] | None]]:
    """Bytes of each part of a tensor, and what tells whether its numbers are finite."""
    if spec.dtype != torch.int8:
        return [(spec.size, _is_finite(spec.dtype))]
    elements = element_count(spec.size)
    return [(elements, None), (spec.size - elements, _is_finite(torch.float32))]


def _is_finite(dtype: torch.dtype) -> Callable[[Any], bool]:
    """Tells whether the numbers of a ``dtype`` in an array of bytes are finite.

    A number that is not finite has all bits of the exponent. So, read as an integer, it is at least that of infinity if
    its sign is positive, and, read as one without sign, at least that of minus infinity if it is negative. That is 40
    GB/s, a tenth of the time of a comparison of bfloat16s.
    """
    signed, unsigned = f"i{dtype.itemsize}", f"u{dtype.itemsize}"
    bound, negative_bound = (
        torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().view(kind)[0]
        for value, kind in ((float("inf"), signed), (float("-inf"), unsigned))
    )

    def check(data: Any) -> bool:
        return bool(data.view(signed).max() < bound and data.view(unsigned).max() < negative_bound)

    return check


class Scratch:
    """Memory for the blocks that one thread reads, one at a time."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def block(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """``count`` elements, at most ``BLOCK``: the same memory each time."""
        if dtype not in self._blocks:
            self._blocks[dtype] = torch.empty(BLOCK, dtype=dtype)
        return self._blocks[dtype][:count]


class TensorFile:
    """Reads parts of tensors from a file that a frame has brought; quantized ones as float32. On any thread."""

    def __init__(self, path: Path, specs: Specs) -> None:
        self._file, layout = StoredFile(path), file_layout(specs)
        self._stored = {spec.name: (spec, span) for spec, span in zip(specs, layout.spans, strict=True)}

    def block(self, name: str, begin: int, count: int, scratch: Scratch) -> torch.Tensor:
        """``count`` elements of a tensor, flat, from ``begin`` on, a multiple of ``BLOCK``: in ``scratch``."""
        spec, span = self._stored[name]
        block = scratch.block(spec.dtype, count)
        self._file.fill(block, span, spec.dtype, (spec.count,), Box((begin,), (count,)))
        if spec.dtype != torch.int8:
            return block
        scales, values = self._scales(name, begin, count), scratch.block(torch.float32, count)
        for first in range(0, count, ALONE):
            part = block[first : first + ALONE]
            values[first : first + ALONE] = dequantize(part, scales[first // GROUP :][: -(-len(part) // GROUP)])
        return values

    def _scales(self, name: str, begin: int, count: int) -> torch.Tensor:
        """Read the scales of ``count`` elements of a quantized tensor, from ``begin`` on."""
        spec, span = self._stored[name]
        scales = torch.empty(-(-count // GROUP), dtype=torch.float32)
        first = element_count(spec.count) + begin // GROUP * scales.itemsize
        coded = scales.view(spec.dtype)
        self._file.fill(coded, span, spec.dtype, (spec.count,), Box((first,), (len(coded),)))
        return scales


@dataclass(frozen=True, slots=True)
class Version:
    """Parameters that a worker may fetch."""

    number: int
    fragment: int | None
    """None: all parameters."""

    @property
    def file_name(self) -> str:
        return f"{self.number:08d}-{'all' if self.fragment is None else self.fragment}.frame"


class Bell:
    """Wakes those who wait on event loops. Rung on any thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def next(self) -> asyncio.Event:
        """Set when it rings next. Look then, before waiting, whether what is waited for has come."""
        rung = asyncio.Event()
        self._waiting.append(partial(asyncio.get_running_loop().call_soon_threadsafe, rung.set))
        return rung

    def ring(self) -> None:
        for _ in range(len(self._waiting)):
            with suppress(IndexError, RuntimeError):  # another thread has rung; the server has ended with its loop
                self._waiting.popleft()()


class Growth:
    """How much of a file is written. Advanced on one thread; awaited on event loops."""

    def __init__(self, length: int, written: int = 0) -> None:
        self.length = length
        """Of the complete file, in bytes."""
        self._written = written
        self._has_failed = False
        self._bell = Bell()

    def advance(self, written: int) -> None:
        self._written = written
        self._bell.ring()

    def fail(self) -> None:
        """Note that no more bytes will be written."""
        self._has_failed = True
        self._bell.ring()

    async def beyond(self, begin: int) -> int:
        """Wait until more than ``begin`` bytes are written, and return how many are."""
        while self._written <= begin:
            rung = self._bell.next()
            if self._written > begin:
                break
            if self._has_failed:
                raise EOFError("the file is not written to its end")
            await rung.wait()
        return self._written


class _Growing(Growth):
    """Of a file that has yet to be written, with the parameters that ``model`` has until then."""

    def __init__(self, path: Path, layout: FrameLayout, model: GlobalModel) -> None:
        super().__init__(layout.length)
        self.path = path
        self._pieces = frame_pieces(layout, model.bytes_as_trained(layout.order))
        self._piece = memoryview(b"")  # the next one to write

    def write(self) -> None:
        descriptor = filesystem.open_own(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.lseek(descriptor, self._written, os.SEEK_SET)
            while self._written < self.length:
                self._piece = self._piece or next(self._pieces)
                filesystem.write_all(descriptor, self._piece, self.path)
                written, self._piece = self._written + len(self._piece), memoryview(b"")
                self.advance(written)
            if os.fstat(descriptor).st_size > self._written:  # of what it overwrites, whose blocks served until here
                filesystem.truncate(descriptor, self._written, self.path)
        finally:
            os.close(descriptor)


class Versions:
    """The files in ``directory``. :meth:`has` and :meth:`open` are called on any thread. Who begins versions calls
    :meth:`write` for each, and at the end :meth:`abandon`, on any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.spare = SpareFiles(directory)
        self._growing: dict[Version, _Growing] = {}
        self._lock = threading.Lock()  # so that a file does not get its name while it is looked for

    def has(self, version: Version) -> bool:
        return version in self._growing or self._path(version).exists()

    def begin(self, versions: Mapping[Version, Specs], model: GlobalModel) -> None:
        """Announce versions that will be written, of the present parameters: all of them, or none if this raises."""
        growing = {}
        for version, specs in versions.items():
            layout = FrameLayout({"version": version.number}, specs)
            growing[version] = _Growing(self.spare.take(), layout, model)
        self._growing.update(growing)

    def write(self, version: Version) -> None:
        """Write a version that was begun, unless it is written. After an OSError, such as that of a full disk, another
        call continues where it was."""
        growing = self._growing.get(version)
        if growing is not None:
            growing.write()
            with self._lock:
                filesystem.rename_nosync(growing.path, self._path(version))
                del self._growing[version]

    def abandon(self, versions: Iterable[Version]) -> None:
        """End the downloads of those versions that were begun and are not written, and delete their files: a full disk
        needs the room."""
        for version in versions:
            with self._lock:
                growing = self._growing.pop(version, None)
            if growing is not None:
                growing.fail()
                with suppress(OSError):
                    filesystem.remove(growing.path)

    def open(self, version: Version) -> tuple[FileIO, Growth]:
        """Open the file of a version, for the caller to close, and return how much of it is written."""
        with self._lock:
            growing = self._growing.get(version)
            if growing is not None:
                return FileIO(filesystem.open_own(growing.path, os.O_RDONLY | os.O_CREAT)), growing
            try:
                file = FileIO(self._path(version))
            except FileNotFoundError:
                raise NotFound(f"version {version.number} of the parameters is not kept; register again") from None
        length = os.fstat(file.fileno()).st_size
        return file, Growth(length, length)

    def release(self, *, except_for: Collection[Version]) -> None:
        names = {version.file_name for version in except_for}
        self.spare.release(lambda path: path.name in names)

    def release_damaged(self) -> None:
        """Release the files that a power cut has left with other content: a mixture, or the version that was in the
        file before."""
        self.spare.release(_has_its_version)

    def _path(self, version: Version) -> Path:
        return self._directory / version.file_name


def _has_its_version(path: Path) -> bool:
    head = head_of_whole_frame(path)
    return head is not None and path.name.startswith(f"{head.get('version')!s:0>8}-")
