"""Model and optimizer through PyTorch's Distributed Checkpoint (DCP), which plans, deduplicates and reshards.

DCP's own storage pickles its metadata, and what is no tensor. Ours takes tensors only: saving lays out files, which
somebody else fills and streams to disk; reading copies out of them; what lies where stands in the
:class:`~.index.Index`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future

from dalsegno import ranks
from dalsegno.errors import DamagedCheckpoint, RankFailed

from .index import Index, StoredPiece, StoredTensor, split
from .layout import Layout, Piece, StoredFile

Tensors = dict[str, dict[str, torch.Tensor]]
"""By component and name; DTensors for what is spread over the ranks."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file of this rank: where its tensors lie, and which they are. ``parts``: component, name, and DCP's name for
    this rank's part of it."""

    name: str
    layout: Layout
    parts: Sequence[tuple[str, str, MetadataIndex]]

    def tensors(self, of: Tensors) -> list[torch.Tensor]:
        """This rank's parts, in the order of the layout. Not copies."""
        return [_part(of[component][name], index) for component, name, index in self.parts]


@dataclass(frozen=True, slots=True)
class Plan:
    """What this rank writes: a file for each component it has a part of; on rank 0, the index over all ranks' files."""

    files: Sequence[FilePlan]
    index: bytes | None


def plan(tensors: Tensors) -> Plan:
    """Share ``tensors``, the same keys on every rank, among the ranks. Collective.

    What is replicated is written once, by the rank with the least to do. Takes tens of microseconds for each tensor of
    each rank, on rank 0: so a plan is kept for as long as :func:`signature` stays the same on all ranks.
    """
    planned = _Planned()
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    with _errors_as_they_were():
        dcp_save(tensors, storage_writer=planned, planner=planner, no_dist=not ranks.initialized())
    return Plan(planned.files, planned.index)


def signature(tensors: Tensors) -> object:
    """Equal for tensors that are laid out and shared alike."""
    return (
        ranks.world_size(),
        [
            (
                component,
                list(its),
                [tensor.dtype for tensor in its.values()],
                [tensor.shape for tensor in its.values()],
                [_spread(tensor) for tensor in its.values() if type(tensor) is DTensor],
            )
            for component, its in tensors.items()
        ],
    )


class Files(Protocol):
    """Where an index's tensors lie: a verified checkpoint, or somebody else's files."""

    def file(self, name: str) -> Path:
        """The path of a file that the index names."""
        ...


def load(tensors: Tensors, files: Files, index: Index) -> None:
    """Fill ``tensors``, in place, whatever the number of ranks that wrote what is stored. Collective.

    Each rank reads only what it needs.
    """
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    wanted = {f"{component}.{name}": stored for component in tensors for name, stored in index.of(component).items()}
    reader = ShardReader(files, Index(wanted))
    with _errors_as_they_were():
        dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=not ranks.initialized())


class _Planned(StorageWriter):
    """Lays out one file for each component, and writes none."""

    def __init__(self) -> None:
        self.files: list[FilePlan] = []
        self.index: bytes | None = None

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
            by_component.setdefault(split(item.index.fqn)[0], []).append(item)
        results: list[WriteResult] = []
        for component, items in by_component.items():
            file = _laid_out(f"{component}/shard-{ranks.rank():05d}.safetensors", items)
            self.files.append(file)
            results += _placed(file, items)
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
                raise RuntimeError(f"{name}: {len(pieces[name])} of {len(stored.chunks)} pieces were laid out")
            tensors[name] = StoredTensor(stored.properties.dtype, tuple(stored.size), tuple(pieces[name]))
        self.index = Index(tensors).to_bytes()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(StorageReader):
    """Copies out of files; each rank reads only what it needs."""

    def __init__(self, files: Files, index: Index) -> None:
        self._files = files
        self._index = index
        self._pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, stored in index.tensors.items()
            for piece in stored.pieces
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
            self._fill(target, item)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill(self, target: torch.Tensor, item: ReadItem) -> None:
        piece = self._pieces[item.storage_index]
        if piece.file not in self._opened:
            self._opened[piece.file] = StoredFile(self._files.file(piece.file))
        dtype = self._index.tensors[item.storage_index.fqn].dtype
        box = list(zip(item.storage_offsets, item.lengths, strict=True))
        self._opened[piece.file].fill(target, piece.span, dtype, piece.shape, box)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _laid_out(name: str, items: list[WriteItem]) -> FilePlan:
    parts = [(*split(item.index.fqn), item.index) for item in items]
    return FilePlan(name, Layout.of(list(_pieces(items))), parts)


def _placed(file: FilePlan, items: list[WriteItem]) -> list[WriteResult]:
    results = []
    for item, span, piece in zip(items, file.layout.spans, file.layout.pieces, strict=True):
        stored = StoredPiece(file.name, span, piece.offsets, piece.shape)
        results.append(WriteResult(item.index, piece.size, stored))
    return results


def _part(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    part = find_tensor_shard(tensor, index) if isinstance(tensor, DTensor) else tensor
    return part.detach() if part.requires_grad else part


def _spread(tensor: DTensor) -> tuple[object, ...]:
    return tensor.placements, tensor.device_mesh


def _pieces(items: list[WriteItem]) -> Iterator[Piece]:
    """What the planner wants written, named as the component names it: a file of one rank loads as a state dict."""
    taken: set[str] = set()
    for item in items:
        data = item.tensor_data
        assert data is not None
        _, name = split(item.index.fqn)
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
