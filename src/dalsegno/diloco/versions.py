"""Versions: files of parameters, as workers fetch them. A worker may fetch one while it is written.

They are not fsynced: the journal can make them again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from dalsegno.errors import NotFound
from dalsegno.system import filesystem

from .frames import FrameLayout, frame_pieces, head_of_whole_frame
from .outer import GlobalModel
from .signature import Specs
from .spool import SpareFiles


@dataclass(frozen=True, slots=True)
class Version:
    """Parameters that a worker may fetch."""

    number: int
    fragment: int | None
    """None: all parameters."""

    @property
    def file_name(self) -> str:
        return f"{self.number:08d}-{'all' if self.fragment is None else self.fragment}.frame"


class Growth:
    """How much of a file is written. Advanced on one thread; awaited on event loops.

    Attributes:
        length: of the complete file, in bytes.
    """

    def __init__(self, length: int, written: int = 0) -> None:
        self.length = length
        self._written = written
        self._has_failed = False
        self._waiting: list[Callable[[], object]] = []

    @classmethod
    def complete(cls, length: int) -> Growth:
        """Of a file that is not written any more."""
        return cls(length, length)

    def advance(self, written: int) -> None:
        """Note that so many bytes are written, from the beginning of the file."""
        self._written = written
        self._wake()

    def fail(self) -> None:
        """Note that no more bytes will be written."""
        self._has_failed = True
        self._wake()

    async def beyond(self, begin: int) -> int:
        """Wait until more than ``begin`` bytes are written, and return how many are.

        Raises:
            EOFError: if they will not be written.
        """
        while self._written <= begin:
            woken = asyncio.Event()
            self._waiting.append(partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set))
            if self._written > begin:  # advanced before this was in the list, so perhaps nothing wakes it
                break
            if self._has_failed:
                raise EOFError("the file is not written to its end")
            await woken.wait()
        return self._written

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                wake()


class _Growing:
    """A file that has yet to be written, with the parameters that ``model`` has until then."""

    def __init__(self, path: Path, layout: FrameLayout, model: GlobalModel) -> None:
        self.path = path
        self.growth = Growth(layout.length)
        self._pieces = frame_pieces(layout, model.bytes_as_trained(layout.order))
        self._piece = memoryview(b"")  # the next one to write
        self._written = 0

    def open(self) -> FileIO:
        """Open the file to read; it may have nothing yet."""
        return FileIO(filesystem.open_own(self.path, os.O_RDONLY | os.O_CREAT))

    def write(self) -> None:
        """Write the file. After an OSError, such as that of a full disk, another call continues where it was."""
        descriptor = filesystem.open_own(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.lseek(descriptor, self._written, os.SEEK_SET)
            while self._written < self.growth.length:
                self._piece = self._piece or next(self._pieces)
                filesystem.write_all(descriptor, self._piece, self.path)
                self._written += len(self._piece)
                self._piece = memoryview(b"")
                self.growth.advance(self._written)
            if os.fstat(descriptor).st_size > self._written:  # of what it overwrites, whose blocks served until here
                filesystem.truncate(descriptor, self._written, self.path)
        finally:
            os.close(descriptor)


class Versions:
    """The files in ``directory``. :meth:`has` and :meth:`open` are called on any thread. Who begins versions calls
    :meth:`write` for each, and at the end :meth:`abandon`, on any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spare = SpareFiles(directory)
        self._growing: dict[Version, _Growing] = {}
        self._lock = threading.Lock()  # so that a file does not get its name while it is looked for

    def has(self, version: Version) -> bool:
        """Whether a version can be opened."""
        return version in self._growing or self._path(version).exists()

    def begin(self, versions: Mapping[Version, Specs], model: GlobalModel) -> None:
        """Announce versions that will be written, of the present parameters: all of them, or none if this raises. With
        the specs of their tensors."""
        growing = {}
        for version, specs in versions.items():
            layout = FrameLayout({"version": version.number}, specs)
            growing[version] = _Growing(self._spare.take(), layout, model)
        self._growing.update(growing)

    def write(self, version: Version) -> None:
        """Write a version that was begun, unless it is written. After an OSError, another call continues."""
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
                growing.growth.fail()
                with suppress(OSError):
                    filesystem.remove(growing.path)

    def open(self, version: Version) -> tuple[FileIO, Growth]:
        """Open the file of a version, for the caller to close, and return how much of it is written.

        Raises:
            NotFound: if it is not kept.
        """
        with self._lock:
            growing = self._growing.get(version)
            if growing is not None:
                return growing.open(), growing.growth
            try:
                file = FileIO(self._path(version))
            except FileNotFoundError:
                raise NotFound(f"version {version.number} of the parameters is not kept; register again") from None
        return file, Growth.complete(os.fstat(file.fileno()).st_size)

    def release(self, *, except_for: Collection[Version]) -> None:
        """Allow the files of versions that no worker may ask for any more to be overwritten."""
        names = {version.file_name for version in except_for}
        for path in list(self._spare.named()):
            if path.name not in names:
                self._spare.give_back(path)

    def release_damaged(self) -> None:
        """As :meth:`release`, for files that a power cut has left with other content: a mixture, or the version that
        was in the file before."""
        for path in list(self._spare.named()):
            head = head_of_whole_frame(path)
            if head is None or not path.name.startswith(f"{head.get('version')!s:0>8}-"):
                self._spare.give_back(path)

    def delete_spare(self) -> None:
        """Delete the files without a name. To be called while none is in use."""
        self._spare.delete_all()

    def _path(self, version: Version) -> Path:
        return self._directory / version.file_name
