"""Spool: files for tensors that arrive, checked before they get a name.

A file that is no longer needed is overwritten by the next one: the disk and the page cache have room for it already.
128 MB take half the time of a new file, and nothing has to be deleted while workers wait.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem
from dalsegno.system.durability import NotDurable

from .frames import FrameReader, in_file_order
from .quantization import element_count
from .signature import Specs, TensorSpec, file_layout

PIECE = 4 << 20
"""Bytes that are received, checked and written at a time. Each is handed over between two threads: with 1 MiB, a round
takes a quarter longer."""

_PARTIAL = ".partial"
_WRITE_BACK = 8 << 20
"""Bytes that are written before the disk is asked to begin with them."""


class SpareFiles:
    """Files of a directory that have no name yet, or no longer. Used by any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spare: deque[Path] = deque()
        self._own = uuid.uuid4().hex[:12]  # a server that was stopped may still write, in this process
        self._numbers = itertools.count()

    def take(self) -> Path:
        """Return the path of a file to overwrite; it may not exist yet."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_path()

    def give_back(self, path: Path) -> None:
        """Allow a file to be overwritten. It loses its name at once, without an fsync: after a power cut the name may
        be back, with any content."""
        spare = path
        if path.suffix != _PARTIAL:
            spare = self._new_path()
            filesystem.rename_nosync(path, spare)
            if spare.stat().st_nlink > 1:  # a copy by links, such as a backup, keeps its bytes
                filesystem.remove(spare)
                return
        self._spare.append(spare)

    def named(self) -> Iterator[Path]:
        """The files that have a name."""
        return (path for path in self._directory.iterdir() if path.suffix != _PARTIAL)

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
        """Give the file its name."""
        filesystem.rename_nosync(self.path, path)
        self.path = path
        self.is_kept = True

    def make_durable(self) -> None:
        """Wait until the file and its name are on disk. On any thread.

        Raises:
            NotDurable: if the disk refuses it, at this call or at an earlier one.
        """
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
        """Close the file. It must be durable by now if it is to be used."""
        with self._turn:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def spooled(files: SpareFiles, specs: Specs, frame: FrameReader) -> Iterator[SpooledTensors]:
    """Write tensors to a file of ``files``, which takes the file back at the end, unless it was kept.

    Raises:
        ConfigurationError: if a tensor has a NaN or an infinity; names it.
        OSError: if the file cannot be written.
    """
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
