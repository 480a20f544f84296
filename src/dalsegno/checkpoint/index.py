"""index.json: every sharded tensor, and which ranks have written which part of it.

::

    {"format": 1,
     "shardings": [{"ranks": [0, 1, 2, 3], "mesh": [2, 2], "cuts": [[1, 0]]}],
     "tensors": {"model.weight": {"dtype": "float32", "shape": [4, 2], "sharding": 0, "replica": 1}}}

``cuts``: dimension 1 of the mesh cuts dimension 0 of the tensor, into parts of equal length, rounded up. Along the rest
of the mesh (dimension 0) are copies: replica 1 was written, by the ranks 2 and 3, to ``model/shard-00002.safetensors``
and ``model/shard-00003.safetensors``; with ``"frozen": true`` to ``model/frozen-…``. The header of each file has the
positions in it, so that no rank writes or reads those of all files: at 1,024 ranks and 10,000 tensors they take 1 GB.

With ``save_frozen="never"`` there is a section ``absent`` of the tensors that are not saved, each with dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import torch

from dalsegno.checkpoint import names
from dalsegno.checkpoint.file_reading import read_json
from dalsegno.checkpoint.manifest import FORMAT, Checkpoint
from dalsegno.checkpoint.sharding import Chunks, ListedChunks, ShardedChunks, Sharding
from dalsegno.checkpoint.tensor_files import DTYPES, Shape, is_shape
from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.schema import Must, check


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint. An absent one has no chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Chunks


_MOST_RANKS = 1 << 24


def _is_ranks(value: list[Any]) -> bool:
    return all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in value)


class FormEntry(TypedDict):
    dtype: Annotated[str, Must(f"one of {', '.join(DTYPES)}", DTYPES.__contains__)]
    shape: Shape


class ShardingEntry(TypedDict):
    ranks: Annotated[list[Any], Must("a list of ranks", _is_ranks)]
    mesh: Shape
    cuts: list[Annotated[list[Any], Must("a pair of dimensions", lambda cut: is_shape(cut) and len(cut) == 2)]]


class TensorEntry(FormEntry):
    sharding: int
    replica: NotRequired[int]
    frozen: NotRequired[bool]


class IndexFile(TypedDict):
    """Content of the file."""

    format: Literal[1]
    shardings: list[ShardingEntry]
    tensors: dict[str, TensorEntry]
    absent: NotRequired[dict[str, FormEntry]]


@dataclass(frozen=True, slots=True)
class Index:
    """The sharded tensors of a checkpoint, by component and name; ``absent``: those that are not saved."""

    tensors: dict[str, dict[str, StoredTensor]]
    absent: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)

    def of(self, component: str) -> dict[str, StoredTensor]:
        return self.tensors.get(component, {})

    def known_of(self, component: str) -> dict[str, StoredTensor]:
        return self.of(component) | self.absent.get(component, {})

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Index:
        return cls.read(checkpoint.file(names.INDEX))

    @classmethod
    def read(cls, path: Path) -> Index:
        return cls.parse(read_json(path), path)

    @classmethod
    def parse(cls, content: Any, path: Path) -> Index:
        check(content, IndexFile, str(path), DamagedCheckpoint)
        tensors: dict[str, dict[str, StoredTensor]] = {}
        absent: dict[str, dict[str, StoredTensor]] = {}
        try:
            shardings = [Sharding.checked(each["ranks"], each["mesh"], each["cuts"]) for each in content["shardings"]]
            for full_name, entry in content["tensors"].items():
                chunks = ShardedChunks.of_entry(full_name, entry, shardings)
                stored = StoredTensor(DTYPES[entry["dtype"]], chunks.shape, chunks)
                tensors.setdefault(chunks.component, {})[chunks.name] = stored
        except ValueError as error:
            raise DamagedCheckpoint(f"{path}: {error}") from error
        for full_name, entry in content.get("absent", {}).items():
            component, name = names.component_and_name(full_name)
            stored = StoredTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), ListedChunks(()))
            absent.setdefault(component, {})[name] = stored
        return cls(tensors, absent)


def to_bytes(
    shardings: Iterable[Sharding], tensors: Mapping[str, TensorEntry], absent: Mapping[str, FormEntry]
) -> bytes:
    """Content of the file; the ``shardings`` in the order of their numbers."""
    listed = [{"ranks": each.ranks, "mesh": each.mesh, "cuts": each.cuts} for each in shardings]
    content = {"format": FORMAT, "shardings": listed, "tensors": tensors} | ({"absent": absent} if absent else {})
    return json.dumps(content, separators=(",", ":")).encode()
