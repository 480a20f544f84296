"""SharedFiles: files in shared memory whose pages are written in place, save after save."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from dalsegno.checkpoint.format.manifest import FileRecord
from dalsegno.system import filesystem

from .checksum import checksum_beside
from .files import Advance, CopiedFile, counted
from .planning import FilePlan
from .staging import Buffer


class NoRoom(Exception):
    """The files do not fit into memory. Raised on all ranks."""


class SharedFiles:
    """The tensor files of one slot. The files stay mapped when the directory is renamed: a save costs a copy.

    Args:
        directory: in which the files are created.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buffers: dict[str, Buffer] = {}
        self._planned: Sequence[FilePlan] | None = None
        self._reserved: Sequence[FilePlan] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def fits(self, files: Sequence[FilePlan]) -> bool:
        """Whether the files are laid out as planned, with all their memory. The same on all ranks, if the plans are."""
        return files is self._reserved

    def lay_out(self, files: Sequence[FilePlan]) -> None:
        """Create the files, whose memory is still to be reserved. Does nothing if they are as planned.

        Raises:
            OSError: if they cannot be created. No file remains.
        """
        if files is self._planned:
            return
        self.clear()
        try:
            for file in files:
                path = self._directory / file.name
                filesystem.mkdir_nosync(path.parent)
                self._buffers[file.name] = Buffer(_FilePages(path))
                self._buffers[file.name].lay_out(file.layout)
        except BaseException:
            self.clear()
            raise
        self._planned = files

    def reserve(self, files: Sequence[FilePlan]) -> None:
        """Lay out the files, and reserve what :meth:`prefault` has not.

        Raises:
            OSError: if there is not enough memory. No file remains.
        """
        self.lay_out(files)
        try:
            for buffer in self._buffers.values():
                buffer.reserve()
        except BaseException:
            self.clear()
            raise
        self._reserved = files

    def clear(self) -> None:
        """Remove the files."""
        self._planned = self._reserved = None
        for name in [*self._buffers]:
            del self._buffers[name]
            filesystem.remove(self._directory / name)

    def prefault(self) -> Iterator[None]:
        """Reserve and map the memory, about a millisecond at each turn; ends where there is none left, which
        :meth:`reserve` reports."""
        with contextlib.suppress(OSError):
            for buffer in [*self._buffers.values()]:
                yield from buffer.prefault()

    def buffer(self, name: str) -> Buffer:
        """The memory of the file ``name``."""
        return self._buffers[name]


class _FilePages:
    """The memory of a new file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self, length: int) -> mmap.mmap:
        return filesystem.map_new(self._path, length)

    def reserve(self, begin: int, length: int) -> None:
        filesystem.reserve(self._path, begin, length)


class MappedFile(CopiedFile):
    """One that is copied to its place; what remains is its checksum."""

    __slots__ = ()

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        blocks = self.copied.to_hash(self.buffer.memory)
        with checksum_beside(counted(blocks, self.length, advance)) as checksum:
            return FileRecord(self.length, checksum.wait())
