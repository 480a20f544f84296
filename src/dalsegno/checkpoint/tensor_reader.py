"""Tensor reader: load sharded tensors at any number of ranks; each rank reads its shards, wherever they are stored.

All reads are planned before the first byte is copied: a checkpoint whose files lack a chunk changes nothing.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dalsegno.checkpoint.contract import TensorsByComponent, box_here
from dalsegno.checkpoint.file_reading import HeaderEntry
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.sharding import Box, StoredChunk
from dalsegno.checkpoint.tensor_files import StoredFile, as_bytes, byte_count, part
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import local_part, unexpanded
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.stateful.annotations import check_types
from dalsegno.system.machine import run_on_threads, thread_count


class PlannedLoad:
    """What this rank reads into ``tensors``, in place: those of components and names that ``index`` has.

    If it ``shares``, one of the ranks that hold equal parts of a tensor reads it, and broadcasts it to the others: for
    ranks that do not share a page cache, where each would read the whole model from the disk that all share. Out of one
    page cache, reading is faster.
    """

    def __init__(self, tensors: TensorsByComponent, files: Files, index: Index, *, shares: bool = False) -> None:
        self._files = files
        self._reader = ChunkReader(files)
        self._reads: list[Read] = []
        self._spared: list[Read] = []  # which other ranks make
        self._received: dict[tuple[dist.ProcessGroup, int], list[torch.Tensor]] = {}  # from each rank of a group
        self.shared: list[object] = []
        """Describes the tensors that are broadcast; to be compared over all ranks."""
        readers: dict[dist.ProcessGroup, list[tuple[int, int]]] = {}  # bytes that each rank of a group reads so far
        for component, its in tensors.items():
            stored = index.of(component)
            for name, tensor in its.items():
                reads = [*planned_reads(tensor, stored[name], f"{component}.{name}")] if name in stored else []
                group = replicas_of(tensor) if shares and name in stored else None
                if group is None:
                    self._reads += reads
                    continue
                if group not in readers:
                    readers[group] = [(0, rank) for rank in sorted(dist.get_process_group_ranks(group))]
                loads = readers[group]
                load, reader = loads[0]
                # By its whole size: so the ranks of all groups broadcast in the same order, and none waits in a circle.
                heapq.heapreplace(loads, (load + byte_count(tensor.shape, tensor.dtype), reader))
                (self._reads if reader == collectives.rank() else self._spared).extend(reads)
                self._received.setdefault((group, reader), []).append(local_part(tensor))
                self.shared.append((component, name, tensor.shape, tensor.dtype, len(loads)))
        self._check(self._reads)

    def read_all(self) -> None:
        """Share nothing: the ranks do not have the same tensors to share."""
        self._reads += self._spared
        self._received.clear()
        self._check(self._spared)

    def _check(self, reads: Sequence[Read]) -> None:
        for read in reads:
            if self._files.is_here(read.chunk.file):
                self._reader.span(read.chunk, read.dtype)

    def fetch(self) -> None:
        """Collective."""
        self._files.require({read.chunk.file for read in self._reads})

    def run(self) -> None:
        """Collective, if it shares. A rank that fails still broadcasts: the others wait for it."""
        failure: Exception | None = None
        try:
            _read_all(sorted(self._reads, key=lambda read: read.chunk.file), self._reader)
        except Exception as error:
            failure = error
        finally:
            self._reader.close()
        for (group, reader), tensors in self._received.items():
            collectives.broadcast_tensors(tensors, reader, group)
        if failure is not None:
            raise failure


_LARGE_BYTES = 1 << 20  # of a read on average: several threads that read less at once wait for the GIL


def _read_all(reads: Sequence[Read], reader: ChunkReader) -> None:
    """Make the reads, on several threads: what comes from the page cache is limited by the processors. Those to a
    device are made on this thread, which has its current stream."""
    is_inference = torch.is_inference_mode_enabled()  # of this thread alone
    remaining = iter(reads)

    def read(_: int) -> None:
        with torch.inference_mode() if is_inference else contextlib.nullcontext():
            try:
                for each in remaining:  # each thread takes the next one
                    each.fill(reader)
            except BaseException:
                deque(remaining, maxlen=0)  # the others stop, too
                raise

    are_large = sum(each.bytes for each in reads) > _LARGE_BYTES * len(reads)
    threads = thread_count() if are_large and all(each.target.is_cpu for each in reads) else 1
    run_on_threads(read, threads, "dalsegno-read")


@dataclass(frozen=True, slots=True)
class Read:
    """A box to read from a chunk with elements of ``dtype`` into ``target``."""

    target: torch.Tensor
    chunk: StoredChunk
    dtype: torch.dtype
    box: Box

    @property
    def bytes(self) -> int:
        return byte_count(self.box.shape, self.dtype)

    def fill(self, reader: ChunkReader) -> None:
        memory = unexpanded(self.target)
        if memory.shape == self.target.shape:
            reader.fill(self.target, self.chunk, self.dtype, self.box)
            return
        read = torch.empty(self.target.shape, dtype=self.dtype)
        reader.fill(read, self.chunk, self.dtype, self.box)
        memory.copy_(_repeated_part(read, memory.shape, self.chunk.name))


def planned_reads(tensor: torch.Tensor, stored: StoredTensor, name: str) -> Iterator[Read]:
    """What this rank reads of a tensor: the common boxes of its shard and the stored chunks. ``name``: for errors."""
    if (here := box_here(tensor, name)) is None:
        return
    local = local_part(tensor)
    for chunk in stored.chunks.overlapping(here):
        box = chunk.box.common(here)
        assert box is not None, "chunks that overlap have common elements"
        yield Read(part(local, box.relative_to(here)), chunk, stored.dtype, box)


def replicas_of(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Ranks that hold the same part of ``tensor`` as this one, and whose backend carries it; None without others. Of a
    mesh with copies along several dimensions, those along the first."""
    local = local_part(tensor)
    is_carried = not local.is_cpu or collectives.communication_device().type == "cpu"
    if not (collectives.initialized() and is_carried and unexpanded(local).shape == local.shape):
        return None
    if place_of(tensor) is not None:
        return None  # of some ranks only
    if not isinstance(tensor, DTensor):
        return dist.group.WORLD
    mesh = tensor.device_mesh
    copies = (number for number, each in enumerate(tensor.placements) if isinstance(each, Replicate))
    along = next((number for number in copies if mesh.size(number) > 1), None)
    return None if along is None or mesh.get_coordinate() is None else mesh.get_group(along)


def _repeated_part(read: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    """The part of ``read`` of that shape, which is repeated along the expanded dimensions."""
    first = read[tuple(slice(size) for size in shape)]
    if not torch.equal(as_bytes(first.expand(read.shape)), as_bytes(read)):  # as bytes, a NaN equals itself
        raise StateMismatch(
            f"{name}: here it is an expanded tensor, of shape {list(shape)} in memory, but the saved tensor differs "
            "along the expanded dimensions; use .expand(…).clone()"
        )
    return first


_MOST_OPEN = 64


class Files(Protocol):
    """The files that an index refers to: a verified checkpoint, or another library's files."""

    def require(self, names: Collection[str]) -> None: ...

    def is_here(self, name: str) -> bool: ...

    def file(self, name: str) -> Path: ...


class ChunkReader:
    """Reads chunks out of files. Parses the header of each file once, and keeps the last :data:`_MOST_OPEN` files open.
    Threads may share it once the headers of all files are parsed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._headers: dict[str, Mapping[str, HeaderEntry]] = {}
        self._opened: dict[str, StoredFile] = {}

    def span(self, chunk: StoredChunk, dtype: torch.dtype) -> tuple[int, int]:
        """First byte of a chunk in its file, and the byte after its last."""
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
        span = self.span(chunk, dtype)
        self._file(chunk.file).fill(target, span, dtype, chunk.box.shape, box.relative_to(chunk.box))

    def full_tensor(self, stored: StoredTensor) -> torch.Tensor:
        for chunk in stored.chunks:  # before memory is taken for a shape that no file has
            self.span(chunk, stored.dtype)
        full = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            self.fill(part(full, chunk.box), chunk, stored.dtype, chunk.box)
        return full

    def close(self) -> None:
        self._opened.clear()

    def _file(self, name: str) -> StoredFile:
        opened = self._opened.get(name)
        if opened is None:
            opened = self._opened[name] = StoredFile(self._files.file(name))
            for surplus in [*self._opened][:-_MOST_OPEN]:
                self._opened.pop(surplus, None)
        return opened


@check_types
def read_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    """Component to name to full tensor, on the CPU, assembled from the shards of all ranks. Raises DamagedCheckpoint if
    a file has content that dalsegno cannot have written."""
    reader = ChunkReader(checkpoint)
    return {
        component: {name: reader.full_tensor(stored) for name, stored in its.items()}
        for component, its in sorted(Index.of_checkpoint(checkpoint).tensors.items())
    }
