"""SharedFiles: files in shared memory whose pages are written in place, save after save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from dalsegno.checkpoint.staging import Buffer
from dalsegno.checkpoint.tensor_files import FileLayout
from dalsegno.system import filesystem

Layouts = Mapping[str, FileLayout]
"""Layouts of files by their names."""


class NoRoom(Exception):
    """The files do not fit into memory. Raised on all ranks."""


class SharedFiles:
    """The tensor files of one slot. The files stay mapped when the directory is renamed: a save costs a copy.

    A file that another checkpoint has too, as a hard link, is never written to: a new one takes its name.

    Args:
        directory: in which the files are created.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buffers: dict[str, Buffer] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def are_ready(self, files: Layouts) -> bool:
        """Whether these files are laid out, with all their memory, and are no other checkpoint's too."""
        return all(self._is_own(name) and self._buffers[name].is_ready(layout) for name, layout in files.items())

    def lay_out(self, files: Layouts) -> None:
        """Create those of the files that are not laid out yet; their memory is still to be reserved. Keeps no others.

        Raises:
            OSError: if they cannot be created. No file remains.
        """
        for name in [*self._buffers]:
            if not (name in files and self._is_own(name) and self._buffers[name].is_laid_out(files[name])):
                self._remove(name)
        try:
            for name, layout in files.items():
                if name not in self._buffers:
                    path = self._directory / name
                    filesystem.mkdir_nosync(path.parent)
                    filesystem.remove(path)  # a link to a file of another checkpoint
                    self._buffers[name] = Buffer(path)
                    self._buffers[name].lay_out(layout)
        except BaseException:
            self.clear()
            raise

    def reserve(self, files: Layouts) -> None:
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

    def release(self, name: str) -> None:
        """Unmap a file that a link is going to replace."""
        self._buffers.pop(name, None)

    def clear(self) -> None:
        """Remove the files."""
        for name in [*self._buffers]:
            self._remove(name)

    def prefault(self) -> Iterator[None]:
        """Reserve and map the memory, about a millisecond at each turn; ends where there is none left, which
        :meth:`reserve` reports."""
        with contextlib.suppress(OSError):
            for buffer in [*self._buffers.values()]:
                yield from buffer.prefault()

    def buffer(self, name: str) -> Buffer:
        """The memory of the file ``name``."""
        return self._buffers[name]

    def _is_own(self, name: str) -> bool:
        return name in self._buffers and filesystem.count_names(self._directory / name) == 1

    def _remove(self, name: str) -> None:
        del self._buffers[name]
        filesystem.remove(self._directory / name)
