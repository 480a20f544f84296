"""Model and optimizer through PyTorch's Distributed Checkpoint (DCP), which plans, deduplicates and reshards.

DCP's own storage pickles its metadata, and what is no tensor. Ours takes tensors only: saving lays out files, which
somebody else fills and streams to disk; reading copies out of them; what lies where stands in the
:class:`~.index.Index`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.layout import StoredFile, as_bytes
from dalsegno.checkpoint.state.sharded import TensorsByComponent
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import once
from dalsegno.errors import DamagedCheckpoint, RankFailed, StateMismatch


class Files(Protocol):
    """Where an index's tensors lie: a verified checkpoint, or somebody else's files."""

    def file(self, name: str) -> Path:
        """The path of a file that the index names."""
        ...


def load(tensors: TensorsByComponent, files: Files, index: Index) -> None:
    """Fill ``tensors``, in place, whatever the number of ranks that wrote what is stored. Collective.

    Each rank reads only what it needs.
    """
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    wanted = {f"{component}.{name}": stored for component in tensors for name, stored in index.of(component).items()}
    reader = ShardReader(files, Index(wanted))
    with _errors_as_they_were():
        dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=not collectives.initialized())


class ShardReader(StorageReader):
    """Copies out of files; each rank reads only what it needs."""

    def __init__(self, files: Files, index: Index) -> None:
        self._files = files
        self._index = index
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, stored in index.tensors.items()
            for chunk in stored.chunks
        }
        self._opened: dict[str, StoredFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(stored.dtype),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                        for chunk in stored.chunks
                    ],
                )
                for name, stored in self._index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            self._fill(target, item)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(self, target: torch.Tensor, item: ReadItem) -> None:
        chunk = self._chunks[item.storage_index]
        if chunk.file not in self._opened:
            self._opened[chunk.file] = StoredFile(self._files.file(chunk.file))
        dtype = self._index.tensors[item.storage_index.fqn].dtype
        box = list(zip(item.storage_offsets, item.lengths, strict=True))
        memory = once(target)
        if memory.shape == target.shape:
            self._opened[chunk.file].fill(target, chunk.span, dtype, chunk.shape, box)
            return
        read = torch.empty(target.shape, dtype=dtype)
        self._opened[chunk.file].fill(read, chunk.span, dtype, chunk.shape, box)
        memory.copy_(_repeated_in(read, memory.shape, item.storage_index.fqn))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _repeated_in(read: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    """The part of that shape which ``read`` repeats.

    Raises:
        StateMismatch: if it does not.
    """
    part = read[tuple(slice(size) for size in shape)]
    if not torch.equal(as_bytes(part.expand(read.shape)), as_bytes(read)):  # as bytes, a NaN equals itself
        raise StateMismatch(
            f"{name}: here it is an expanded tensor, of shape {list(shape)} in memory, but what was saved differs "
            "along what is expanded; make it whole: .expand(…).clone()"
        )
    return part


@contextmanager
def _errors_as_they_were() -> Iterator[None]:
    """DCP wraps errors of all ranks in a BaseException of its own; raise this rank's own instead."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            yield
    except CheckpointException as error:
        failures: Mapping[int, tuple[BaseException, Any]] = error.failures
        if collectives.rank() in failures:
            raise failures[collectives.rank()][0] from None
        number, (first, _) = next(iter(failures.items()))
        kind = DamagedCheckpoint if isinstance(first, DamagedCheckpoint) else RankFailed
        raise kind(f"rank {number}: {type(first).__name__}: {first}") from None
