"""Versions: files of parameters, as workers fetch them. A worker may fetch one while it is written.

They are not fsynced: the journal can make them again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dalsegno.errors import NotFound
from dalsegno.system import filesystem
from dalsegno.web.growth import Growth

from .frames import FrameLayout, frame_pieces, head_of_whole_frame
from .outer import GlobalModel
from .signature import Specs
from .spool import SpareFiles, removed_on_failure


@dataclass(frozen=True, slots=True)
class Version:
    """Parameters that a worker may fetch."""

    number: int
    fragment: int | None
    """None: all parameters."""

    @property
    def file_name(self) -> str:
        return f"{self.number:08d}-{'all' if self.fragment is None else self.fragment}.frame"


@dataclass(frozen=True, slots=True)
class _Growing:
    """A file that has yet to be written."""

    path: Path
    layout: FrameLayout
    growth: Growth


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

    def begin(self, versions: Mapping[Version, Specs]) -> None:
        """Announce versions that will be written: all, or none if this raises. With the specs of their tensors."""
        self._growing |= {version: self._grow(version, specs) for version, specs in versions.items()}

    def _grow(self, version: Version, specs: Specs) -> _Growing:
        layout, path = FrameLayout({"version": version.number}, specs), self._spare.take()
        os.close(filesystem.open_own(path, os.O_WRONLY | os.O_CREAT))
        return _Growing(path, layout, Growth(layout.length))

    def write(self, version: Version, model: GlobalModel) -> None:
        """Write a version that was begun."""
        growing = self._growing[version]
        pieces = frame_pieces(growing.layout, model.bytes_as_trained(growing.layout.order))
        with removed_on_failure(growing.path):
            filesystem.write_pieces(growing.path, _noted(pieces, growing.growth))
            with self._lock:
                filesystem.rename_nosync(growing.path, self._path(version))
                del self._growing[version]

    def abandon(self, versions: Iterable[Version]) -> None:
        """End the downloads of those versions that were begun and are not written."""
        for version in versions:
            with self._lock:
                growing = self._growing.pop(version, None)
            if growing is not None:
                growing.growth.fail()
                self._spare.give_back(growing.path)

    def open(self, version: Version) -> tuple[FileIO, Growth]:
        """Open the file of a version, for the caller to close, and return how much of it is written.

        Raises:
            NotFound: if it is not kept.
        """
        with self._lock:
            growing = self._growing.get(version)
            path = self._path(version) if growing is None else growing.path
            try:
                file = FileIO(path)
            except FileNotFoundError:
                raise NotFound(f"version {version.number} of the parameters is not kept; register again") from None
        return file, Growth.complete(os.fstat(file.fileno()).st_size) if growing is None else growing.growth

    def release(self, *, except_for: Collection[Version]) -> None:
        """Let the files of versions be overwritten that no worker may ask for any more."""
        names = {version.file_name for version in except_for}
        for path in list(self._spare.named()):
            if path.name not in names:
                self._spare.give_back(path)

    def release_damaged(self) -> None:
        """As :meth:`release`, for those that a power cut has left with other content: mixed, or that of the version
        that they had before."""
        for path in list(self._spare.named()):
            head = head_of_whole_frame(path)
            if head is None or not path.name.startswith(f"{head.get('version')!s:0>8}-"):
                self._spare.give_back(path)

    def delete_spare(self) -> None:
        """Delete the files without a name. While none is in use."""
        self._spare.delete_all()

    def _path(self, version: Version) -> Path:
        return self._directory / version.file_name


def _noted(pieces: Iterable[memoryview], growth: Growth) -> Iterator[memoryview]:
    """Advance the growth of a file with each piece that was written to it: when the next one is asked for."""
    written = 0
    for piece in pieces:
        yield piece
        written += len(piece)
        growth.advance(written)
