"""Files that a save does not write again, because the checkpoint before has a file of the same content.

The proof is the checksum of the file that the live tensors would make. It is computed while the state is captured and
training waits: so a tensor that is changed later can neither be missed nor be torn. The cost is one read of these
tensors (10 GB/s on one core, about as long as a copy of them), and no memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from dalsegno.checkpoint.format.layout import FileLayout
from dalsegno.checkpoint.format.manifest import FileRecord, opened
from dalsegno.errors import DamagedCheckpoint
from dalsegno.system import filesystem

from .file_order import in_file_order
from .files import Advance

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""The filesystem has no hard links, or no more of this file."""


@dataclass(frozen=True, slots=True)
class FormerFiles:
    """Files of a published checkpoint that this process has verified, or this rank has written."""

    directory: Path
    records: Mapping[str, FileRecord]

    def has_size(self, size: int) -> bool:
        """Whether there is a file of ``size`` bytes."""
        return any(record.size == size for record in self.records.values())

    def path_of(self, content: FileRecord) -> Path | None:
        """Path of a file of that content; None if there is none, or it has been removed."""
        paths = (self.directory / name for name, record in self.records.items() if record == content)
        return next((path for path in paths if _is_file(path, content.size)), None)

    def are_beside(self, directory: Path) -> bool:
        """Whether ``directory``, or the parent in which it will be created, is on the same filesystem."""
        existing = next(each for each in (directory, *directory.parents) if each.exists())
        return self.directory.exists() and self.directory.stat().st_dev == existing.stat().st_dev


@torch.no_grad()
def record_of(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> FileRecord:
    """Record of the file that these tensors make, on any device. Reads all of them, and copies one piece at a time."""
    checksum = xxhash.xxh3_128()
    for raw in in_file_order(layout, tensors):
        for piece in torch.split(raw, filesystem.DIRECT_PIECE):
            checksum.update(piece.cpu().numpy().data)
    return FileRecord(layout.length, checksum.hexdigest())


@dataclass(frozen=True, slots=True)
class UnchangedFile:
    """A file that becomes a hard link to ``source``, which has the same content; a copy where links are refused."""

    name: str
    record: FileRecord
    source: Path
    length: int = 0

    def write_to(self, directory: Path, advance: Advance) -> FileRecord:
        """
        Raises:
            DamagedCheckpoint: if it had to be copied, and has another content by now.
            OSError: if ``source`` has been removed, or the disk refuses it.
        """
        try:
            filesystem.link(self.source, directory / self.name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            filesystem.replace_durably_in_pieces(directory / self.name, self._pieces(advance))
        return self.record

    def _pieces(self, advance: Advance) -> Iterator[bytes]:
        checksum = xxhash.xxh3_128()
        with opened(self.source) as descriptor:
            while piece := os.read(descriptor, filesystem.DIRECT_PIECE):
                advance(len(piece))
                checksum.update(piece)
                yield piece
        if checksum.hexdigest() != self.record.xxh3:
            raise DamagedCheckpoint(f"{self.source}: has checksum {checksum.hexdigest()}, not {self.record.xxh3}")


def _is_file(path: Path, size: int) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size
