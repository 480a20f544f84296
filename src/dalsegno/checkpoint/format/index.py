"""index.json: where each chunk of each sharded tensor is stored, so that no rank reads the headers of all files.

::

    {"format": 1, "tensors": {"model.weight": {"dtype": "float32", "shape": [4, 2], "pieces": [
        {"file": "model/shard-00000.safetensors", "bytes": [4096, 4112], "offsets": [0, 0], "shape": [2, 2]}, …]}}}

``bytes`` is the range in the file; ``offsets`` and ``shape`` are the chunk's box in the full tensor. With
``save_frozen="never"`` there is a section ``absent`` of the tensors that are not saved: ``{"dtype": …, "shape": …}``.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import torch

from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.schema import Must, check

from . import names
from .layout import DTYPES, byte_count, is_shape, name_of
from .manifest import Checkpoint, read_json

FORMAT = 1

_MOST_CUTS = 8  # dimensions along which a tensor may be sharded

Shape = Annotated[list[Any], Must("a list of dimensions", is_shape)]


class PieceEntry(TypedDict):
    file: str
    bytes: Shape
    offsets: Shape
    shape: Shape


class FormEntry(TypedDict):
    dtype: Annotated[str, Must(f"one of {', '.join(DTYPES)}", DTYPES.__contains__)]
    shape: Shape


class TensorEntry(FormEntry):
    pieces: list[PieceEntry]


class IndexFile(TypedDict):
    """Content of the file."""

    format: Literal[1]
    tensors: dict[str, TensorEntry]
    absent: NotRequired[dict[str, FormEntry]]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor. ``span``: its first byte in ``file`` and the byte after its last."""

    file: str
    span: tuple[int, int]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint. Its chunks cover each element exactly once; an absent tensor has none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The sharded tensors of a checkpoint, by ``<component>.<name>``; ``absent``: those that are not saved."""

    tensors: Mapping[str, StoredTensor]
    absent: Mapping[str, StoredTensor] = field(default_factory=dict)

    def of(self, component: str) -> dict[str, StoredTensor]:
        """Tensors of one component, by their names within it."""
        return _within(component, self.tensors)

    def absent_of(self, component: str) -> dict[str, StoredTensor]:
        """Tensors of one component that are not saved, by their names within it."""
        return _within(component, self.absent)

    def known_of(self, component: str) -> dict[str, StoredTensor]:
        """Tensors of one component, saved or not."""
        return self.of(component) | self.absent_of(component)

    def to_bytes(self) -> bytes:
        tensors = {
            name: {
                "dtype": name_of(each.dtype),
                "shape": each.shape,
                "pieces": [
                    {"file": chunk.file, "bytes": chunk.span, "offsets": chunk.offsets, "shape": chunk.shape}
                    for chunk in each.chunks
                ],
            }
            for name, each in self.tensors.items()
        }
        absent = {name: {"dtype": name_of(each.dtype), "shape": each.shape} for name, each in self.absent.items()}
        content = {"format": FORMAT, "tensors": tensors} | ({"absent": absent} if absent else {})
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read the index at ``path``.

        Raises:
            DamagedCheckpoint: if the file is not an index, or the chunks of a tensor do not cover it exactly once.
        """
        content = read_json(path)
        check(content, IndexFile, str(path), DamagedCheckpoint)
        try:
            return cls(
                {name: _tensor(name, entry) for name, entry in content["tensors"].items()},
                {
                    name: StoredTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), ())
                    for name, entry in content.get("absent", {}).items()
                },
            )
        except ValueError as error:
            raise DamagedCheckpoint(f"{path}: {error}") from error


def index_of(checkpoint: Checkpoint) -> Index:
    """Read the index of a verified checkpoint.

    Raises:
        DamagedCheckpoint: if it is invalid, or a chunk is not in one of the checkpoint's files.
    """
    path, sizes = checkpoint.file(names.INDEX), checkpoint.manifest.files
    index = Index.read(path)
    for name, stored in index.tensors.items():
        for chunk in stored.chunks:
            if chunk.file not in sizes or chunk.span[1] > sizes[chunk.file].size:
                raise DamagedCheckpoint(f"{path}: {name}: bytes {list(chunk.span)} are not in {chunk.file!r}")
    return index


def _within(component: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def split(full_name: str) -> tuple[str, str]:
    """Component, and the tensor's name within it. A callback's component contains a dot: ``callbacks.EMA``."""
    component, _, name = full_name.partition(".")
    if component == "callbacks":
        own, _, name = name.partition(".")
        component = f"{component}.{own}"
    return component, name


def _tensor(name: str, entry: TensorEntry) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    chunks = tuple(_chunk(name, chunk, dtype, shape) for chunk in entry["pieces"])
    if not _cover(chunks, shape):
        raise ValueError(f"the chunks of {name} do not cover it")
    return StoredTensor(dtype, shape, chunks)


def _cover(chunks: Sequence[StoredChunk], whole: tuple[int, ...]) -> bool:
    """Whether the chunks, all within ``whole``, cover each element once.

    They do if the element counts are equal, and if the corners of the full tensor are the only ones that occur an odd
    number of times: then an odd number of chunks covers each element, which can only be one. No pairs are compared.
    """
    full = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if sum(math.prod(chunk.shape) for chunk in full) != math.prod(whole):
        return False
    cut = [dimension for dimension, size in enumerate(whole) if any(chunk.shape[dimension] != size for chunk in full)]
    if len(full) <= 1:
        return True
    if len(cut) > _MOST_CUTS:
        return False
    odd: set[tuple[int, ...]] = set()
    for chunk in full:
        ends = ((chunk.offsets[each], chunk.offsets[each] + chunk.shape[each]) for each in cut)
        odd.symmetric_difference_update(itertools.product(*ends))
    return odd == set(itertools.product(*((0, whole[each]) for each in cut)))


def _chunk(name: str, entry: PieceEntry, dtype: torch.dtype, whole: tuple[int, ...]) -> StoredChunk:
    span, offsets, shape = entry["bytes"], tuple(entry["offsets"]), tuple(entry["shape"])
    inside = len(offsets) == len(shape) == len(whole) and all(
        begin + size <= limit for begin, size, limit in zip(offsets, shape, whole, strict=True)
    )
    if not inside or len(span) != 2 or span[1] - span[0] != byte_count(shape, dtype):
        raise ValueError(f"a chunk of {name} is outside the tensor")
    return StoredChunk(entry["file"], (span[0], span[1]), offsets, shape)
