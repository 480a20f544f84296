"""index.json: where each tensor's pieces lie, so that no rank has to read the headers of all files.

::

    {"format": 1, "tensors": {"model.weight": {"dtype": "float32", "shape": [4, 2], "pieces": [
        {"file": "model/shard-00000.safetensors", "bytes": [4096, 4112], "offsets": [0, 0], "shape": [2, 2]}, …]}}}

``bytes`` count from the beginning of the file; ``offsets`` and the piece's ``shape`` are its box in the whole tensor.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch

from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.schema import Must, check

from .layout import DTYPES, byte_count, is_shape, name_of
from .manifest import Checkpoint, read_json

FILE_NAME = "index.json"
FORMAT = 1

_MOST_CUTS = 8  # dimensions along which a tensor may be spread over ranks


Shape = Annotated[list[Any], Must("a list of dimensions", is_shape)]


class PieceEntry(TypedDict):
    file: str
    bytes: Shape
    offsets: Shape
    shape: Shape


class TensorEntry(TypedDict):
    dtype: Annotated[str, Must(f"one of {', '.join(DTYPES)}", DTYPES.__contains__)]
    shape: Shape
    pieces: list[PieceEntry]


class IndexFile(TypedDict):
    """What the file holds."""

    format: Literal[1]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor: ``span`` is its first byte in ``file`` and the byte after its last."""

    file: str
    span: tuple[int, int]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint; its pieces fill it exactly."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Every sharded tensor of a checkpoint, by ``<component>.<name>``."""

    tensors: Mapping[str, StoredTensor]

    def of(self, component: str) -> dict[str, StoredTensor]:
        """The tensors of one component, under their own names."""
        prefix = f"{component}."
        return {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}

    def to_bytes(self) -> bytes:
        tensors = {
            name: {
                "dtype": name_of(each.dtype),
                "shape": each.shape,
                "pieces": [
                    {"file": piece.file, "bytes": piece.span, "offsets": piece.offsets, "shape": piece.shape}
                    for piece in each.pieces
                ],
            }
            for name, each in self.tensors.items()
        }
        return json.dumps({"format": FORMAT, "tensors": tensors}, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path) -> Index:
        """The index at ``path``.

        Raises:
            DamagedCheckpoint: if a tensor in it is not exactly filled by its pieces, or the file is no index at all.
        """
        content = read_json(path)
        check(content, IndexFile, str(path), DamagedCheckpoint)
        try:
            return cls({name: _tensor(name, entry) for name, entry in content["tensors"].items()})
        except ValueError as error:
            raise DamagedCheckpoint(f"{path}: {error}") from error


def index_of(checkpoint: Checkpoint) -> Index:
    """The index of a verified checkpoint; every piece lies in one of its files.

    Raises:
        DamagedCheckpoint: if that is not so.
    """
    path, sizes = checkpoint.file(FILE_NAME), checkpoint.manifest.files
    index = Index.read(path)
    for name, stored in index.tensors.items():
        for piece in stored.pieces:
            if piece.file not in sizes or piece.span[1] > sizes[piece.file].size:
                raise DamagedCheckpoint(f"{path}: {name}: bytes {list(piece.span)} are not in {piece.file!r}")
    return index


def split(full_name: str) -> tuple[str, str]:
    """Component, and the tensor's name in it. A callback's component has a dot of its own: ``callbacks.EMA``."""
    component, _, name = full_name.partition(".")
    if component == "callbacks":
        own, _, name = name.partition(".")
        component = f"{component}.{own}"
    return component, name


def _tensor(name: str, entry: TensorEntry) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    pieces = tuple(_piece(name, piece, dtype, shape) for piece in entry["pieces"])
    if not _fill(pieces, shape):
        raise ValueError(f"the pieces of {name} do not fill it")
    return StoredTensor(dtype, shape, pieces)


def _fill(pieces: Sequence[StoredPiece], whole: tuple[int, ...]) -> bool:
    """Whether the pieces, which lie inside of the whole, cover each of its elements once.

    They do if they have as many elements, and if of all their corners only those of the whole are there an odd number
    of times: then an odd number of pieces covers each element, and only one can. So no two of them need be compared.
    """
    full = [piece for piece in pieces if math.prod(piece.shape)]
    if sum(math.prod(piece.shape) for piece in full) != math.prod(whole):
        return False
    cut = [dimension for dimension, size in enumerate(whole) if any(piece.shape[dimension] != size for piece in full)]
    if len(full) <= 1:
        return True
    if len(cut) > _MOST_CUTS:
        return False
    odd: set[tuple[int, ...]] = set()
    for piece in full:
        ends = ((piece.offsets[each], piece.offsets[each] + piece.shape[each]) for each in cut)
        odd.symmetric_difference_update(itertools.product(*ends))
    return odd == set(itertools.product(*((0, whole[each]) for each in cut)))


def _piece(name: str, entry: PieceEntry, dtype: torch.dtype, whole: tuple[int, ...]) -> StoredPiece:
    span, offsets, shape = entry["bytes"], tuple(entry["offsets"]), tuple(entry["shape"])
    inside = len(offsets) == len(shape) == len(whole) and all(
        begin + size <= limit for begin, size, limit in zip(offsets, shape, whole, strict=True)
    )
    if not inside or len(span) != 2 or span[1] - span[0] != byte_count(shape, dtype):
        raise ValueError(f"a piece of {name} lies outside of it")
    return StoredPiece(entry["file"], (span[0], span[1]), offsets, shape)
