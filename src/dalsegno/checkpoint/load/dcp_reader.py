"""DCP reader: load sharded tensors through PyTorch's Distributed Checkpoint (DCP), which plans and reshards.

DCP's own storage unpickles its metadata and all non-tensor items. This reader has tensors only, and finds them in the
:class:`~dalsegno.checkpoint.format.index.Index`.
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
from dalsegno.checkpoint.state.contract import TensorsByComponent
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import once
from dalsegno.errors import DamagedCheckpoint, RankFailed, StateMismatch


class Files(Protocol):
    """The files that an index refers to: a verified checkpoint, or another library's files."""

    def file(self, name: str) -> Path:
        """Path of a file that the index names."""
        ...


def load(tensors: TensorsByComponent, files: Files, index: Index) -> None:
    """Load into ``tensors`` in place, at any number of ranks that saved. Collective.

    Each rank reads only its shards.
    """
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    wanted = {f"{component}.{name}": stored for component in tensors for name, stored in index.of(component).items()}
    reader = ShardReader(files, Index(wanted))
    with _own_errors():
        dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=not collectives.initialized())


class ShardReader(StorageReader):
    """Copies tensors out of files."""

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
        memory.copy_(_unexpanded(read, memory.shape, item.storage_index.fqn))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _unexpanded(read: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
    """The part of ``read`` of that shape, which is repeated along the expanded dimensions.

    Raises:
        StateMismatch: if it is not repeated.
    """
    part = read[tuple(slice(size) for size in shape)]
    if not torch.equal(as_bytes(part.expand(read.shape)), as_bytes(read)):  # as bytes, a NaN equals itself
        raise StateMismatch(
            f"{name}: here it is an expanded tensor, of shape {list(shape)} in memory, but the saved tensor differs "
            "along the expanded dimensions; use .expand(…).clone()"
        )
    return part


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise this rank's own error instead of DCP's BaseException that wraps those of all ranks."""
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
