"""Model and optimizer through PyTorch's Distributed Checkpoint (DCP), which plans, deduplicates and reshards.

DCP's own storage pickles its metadata, and what is no tensor. Ours takes tensors only: writing fills staged files that
somebody else streams to disk, reading maps them; what lies where stands in the :class:`~.index.Index`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dalsegno import ranks
from dalsegno.errors import DamagedCheckpoint, RankFailed

from .index import Index, StoredPiece, StoredTensor
from .layout import MappedFile, Piece, StagedFile
from .manifest import Checkpoint

Tensors = dict[str, dict[str, torch.Tensor]]
"""By component and name; DTensors for what is spread over the ranks."""


def stage(tensors: Tensors, staged_file: Callable[[str], StagedFile]) -> tuple[list[StagedFile], Index | None]:
    """Copy this rank's part of ``tensors`` into staged files. Collective.

    Args:
        tensors: the same keys on every rank. What is replicated is staged once, by the rank with the least to do.
        staged_file: gives the file of that name, which the caller keeps from save to save.

    Returns:
        This rank's files, one for each component it has a part of; and, on rank 0, the index over all ranks' files.
    """
    writer = ShardWriter(staged_file)
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    with _errors_as_they_were():
        dcp_save(tensors, storage_writer=writer, planner=planner, no_dist=not ranks.initialized())
    return writer.files, writer.index


def load(tensors: Tensors, checkpoint: Checkpoint, index: Index) -> None:
    """Fill ``tensors`` from a verified checkpoint, in place, whatever the number of ranks that wrote it. Collective."""
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    wanted = {f"{component}.{name}": stored for component in tensors for name, stored in index.of(component).items()}
    reader = ShardReader(checkpoint, Index(wanted))
    with _errors_as_they_were():
        dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=not ranks.initialized())


class ShardWriter(StorageWriter):
    """Fills one staged file for each component."""

    def __init__(self, staged_file: Callable[[str], StagedFile]) -> None:
        self._staged_file = staged_file
        self.files: list[StagedFile] = []
        self.index: Index | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files, self.index = [], None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_component: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_component.setdefault(item.index.fqn.partition(".")[0], []).append(item)
        results: list[WriteResult] = []
        for component, items in by_component.items():
            file = self._staged_file(f"{component}/shard-{ranks.rank():05d}.safetensors")
            self.files.append(file)
            results += _fill(file, items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (each for of_one_rank in results for each in of_one_rank):
            pieces[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            if len(pieces[name]) != len(stored.chunks):  # an exception in a DCP thread can vanish: count
                raise RuntimeError(f"{name}: {len(pieces[name])} of {len(stored.chunks)} pieces were staged")
            tensors[name] = StoredTensor(stored.properties.dtype, tuple(stored.size), tuple(pieces[name]))
        self.index = Index(tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(StorageReader):
    """Copies out of mapped files; each rank maps only those that it needs a part of."""

    def __init__(self, checkpoint: Checkpoint, index: Index) -> None:
        self._checkpoint = checkpoint
        self._index = index
        self._pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, stored in index.tensors.items()
            for piece in stored.pieces
        }
        self._mapped: dict[str, MappedFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(stored.dtype),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                        for piece in stored.pieces
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
            target.copy_(self._box(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _box(self, item: ReadItem) -> torch.Tensor:
        piece = self._pieces[item.storage_index]
        if piece.file not in self._mapped:
            self._mapped[piece.file] = MappedFile(self._checkpoint.file(piece.file))
        dtype = self._index.tensors[item.storage_index.fqn].dtype
        tensor = self._mapped[piece.file].tensor(piece.span, dtype, piece.shape)
        for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, begin, length)
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _fill(file: StagedFile, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    spans = file.lay_out(list(_pieces(items)))
    results = []
    for item, span in zip(items, spans, strict=True):
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
        file.fill(span, tensor)
        chunk = item.tensor_data.chunk
        stored = StoredPiece(file.name, span, tuple(chunk.offsets), tuple(chunk.sizes))
        results.append(WriteResult(item.index, span[1] - span[0], stored))
    return results


def _pieces(items: list[WriteItem]) -> Iterator[Piece]:
    """What the planner wants written, named as the component names it: a file of one rank loads as a state dict."""
    taken: set[str] = set()
    for item in items:
        data = item.tensor_data
        assert data is not None
        name = item.index.fqn.partition(".")[2]
        if name in taken:
            name = f"{name}@{','.join(map(str, data.chunk.offsets))}"
        taken.add(name)
        yield Piece(name, data.properties.dtype, tuple(data.chunk.sizes), tuple(data.chunk.offsets), tuple(data.size))


@contextmanager
def _errors_as_they_were() -> Iterator[None]:
    """DCP wraps errors of all ranks in a BaseException of its own; raise this rank's own instead."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            yield
    except CheckpointException as error:
        failures: Mapping[int, tuple[BaseException, Any]] = error.failures
        if ranks.rank() in failures:
            raise failures[ranks.rank()][0] from None
        number, (first, _) = next(iter(failures.items()))
        kind = DamagedCheckpoint if isinstance(first, DamagedCheckpoint) else RankFailed
        raise kind(f"rank {number}: {type(first).__name__}: {first}") from None
