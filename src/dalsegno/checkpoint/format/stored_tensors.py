"""Stored tensors: dtype, shape and chunks of each, and reading them from the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dalsegno.errors import DamagedCheckpoint

from .chunks import Chunks, StoredChunk
from .header import HeaderEntry
from .layout import StoredFile
from .sharding import Box

_MOST_OPEN = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint. An absent one has no chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks


class Files(Protocol):
    """The files that an index refers to: a verified checkpoint, or another library's files."""

    def require(self, names: Collection[str]) -> None:
        """Make the files ``names`` readable for this rank. Collective; each rank passes its own."""

    def file(self, name: str) -> Path:
        """Path of a file that the index names."""


class ChunkReader:
    """Reads chunks out of files. Parses the header of each file once, and keeps the last :data:`_MOST_OPEN` files open:
    a tensor may have a chunk in each. Threads may share it once the headers of all files are parsed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._headers: dict[str, Mapping[str, HeaderEntry]] = {}
        self._opened: dict[str, StoredFile] = {}

    def span(self, chunk: StoredChunk, dtype: torch.dtype) -> tuple[int, int]:
        """First byte of a chunk in its file, and the byte after its last.

        Raises:
            DamagedCheckpoint: if the file does not contain this chunk.
        """
        file = self._file(chunk.file)
        if chunk.file not in self._headers:
            self._headers[chunk.file] = file.header()
        entry = self._headers[chunk.file].get(chunk.name)
        if entry is None:
            raise DamagedCheckpoint(f"{file.path}: does not contain {chunk.name}")
        file.check(entry.span, dtype, chunk.box.shape)
        if (entry.offsets or (0,) * len(chunk.box.offsets)) != chunk.box.offsets:
            offsets, expected = list(entry.offsets or ()), list(chunk.box.offsets)
            raise DamagedCheckpoint(f"{file.path}: {chunk.name} begins at {offsets}, the index has {expected}")
        return entry.span

    def fill(self, target: torch.Tensor, chunk: StoredChunk, dtype: torch.dtype, box: Box) -> None:
        """Copy ``box``, part of a chunk with elements of ``dtype``, into ``target``, on any device."""
        within = box.relative_to(chunk.box)
        ranges = list(zip(within.offsets, within.shape, strict=True))
        self._file(chunk.file).fill(target, self.span(chunk, dtype), dtype, chunk.box.shape, ranges)

    def full_tensor(self, stored: StoredTensor) -> torch.Tensor:
        """All of a tensor, assembled from its chunks.

        Raises:
            DamagedCheckpoint: if a chunk is not where the index has it.
        """
        for chunk in stored.chunks:  # before memory is taken for a shape that no file has
            self.span(chunk, stored.dtype)
        full = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            self.fill(part(full, chunk.box), chunk, stored.dtype, chunk.box)
        return full

    def _file(self, name: str) -> StoredFile:
        opened = self._opened.get(name)
        if opened is None:
            opened = self._opened[name] = StoredFile(self._files.file(name))
            for surplus in [*self._opened][:-_MOST_OPEN]:
                self._opened.pop(surplus, None)
        return opened


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the elements of ``box``."""
    for dimension, (begin, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dimension, begin, length)
    return tensor
