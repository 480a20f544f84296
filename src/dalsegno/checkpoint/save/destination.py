"""Destinations: where a save writes a checkpoint, and how it is published there. Rank 0 calls the methods."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.checkpoint.manifest import Manifest
from dalsegno.system import filesystem
from dalsegno.system.byte_sizes import format_bytes

from .resources import free_disk


class Destination(Protocol):
    """Directories of one save."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint once it is published."""

    @property
    def partial(self) -> Path:
        """Directory that all ranks write to."""

    def make_room(self, length: int) -> str | None:
        """Prepare ``partial`` for files of ``length`` bytes; returns why that is not possible, if so."""

    def publish(self, manifest: Manifest) -> None:
        """Make ``partial``, which all ranks have written, the checkpoint at ``path``."""

    def discard(self) -> None:
        """Undo what a save that has failed left in ``partial``."""


class NewDirectory:
    """A directory that each save creates, on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = names.partial_path(path)

    def make_room(self, length: int) -> str | None:
        filesystem.remove(self.partial)
        filesystem.make_directory(self.partial.parent)
        filesystem.mkdir_nosync(self.partial)
        free = free_disk(self.partial)
        if length <= free:
            return None
        disk = f"the disk of {self.partial.parent}"
        return f"it takes {format_bytes(length)}, and {format_bytes(free)} are free on {disk}"

    def publish(self, manifest: Manifest) -> None:
        checkpoint_dir.publish(manifest, self.partial, self.path)

    def discard(self) -> None:
        filesystem.remove(self.partial)
