"""The index of checkpoint formats 1 to 3: each chunk of each tensor is listed.

::

    {"format": 1, "tensors": {"model.weight": {"dtype": "float32", "shape": [4, 2], "pieces": [
        {"file": "model/shard-00000.safetensors", "bytes": [4096, 4112], "offsets": [0, 0], "shape": [2, 2]}, …]}}}

``offsets`` and ``shape`` are the chunk's box in the full tensor. ``bytes`` is not used: the file's header has them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

from dalsegno.stateful.schema import Must

from .chunks import ListedChunks, StoredChunk
from .layout import DTYPES, Shape
from .names import component_and_name
from .sharding import Box
from .stored_tensors import StoredTensor

FORMAT = 1

_MOST_CUTS = 8  # dimensions along which a tensor may be sharded


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


class FormerIndexFile(TypedDict):
    """Content of the file."""

    format: Literal[1]
    tensors: dict[str, TensorEntry]
    absent: NotRequired[dict[str, FormEntry]]


def tensors_of(content: FormerIndexFile) -> Mapping[str, StoredTensor]:
    """The tensors of a checked file.

    Raises:
        ValueError: if the chunks of a tensor do not cover it exactly once.
    """
    return {name: _tensor(name, entry) for name, entry in content["tensors"].items()}


def _tensor(name: str, entry: TensorEntry) -> StoredTensor:
    whole, own_name = tuple(entry["shape"]), component_and_name(name)[1]
    chunks = []
    for piece in entry["pieces"]:
        box = Box(tuple(piece["offsets"]), tuple(piece["shape"]))
        if not box.is_inside(whole):
            raise ValueError(f"a chunk of {name} is outside the tensor")
        chunks.append(StoredChunk(piece["file"], own_name, box))
    if not _cover([chunk.box for chunk in chunks], whole):
        raise ValueError(f"the chunks of {name} do not cover it")
    return StoredTensor(DTYPES[entry["dtype"]], whole, ListedChunks(tuple(chunks)))


def _cover(boxes: Sequence[Box], whole: tuple[int, ...]) -> bool:
    """Whether the boxes, all within ``whole``, cover each element once.

    They do if the element counts are equal, and if the corners of the full tensor are the only ones that occur an odd
    number of times: then an odd number of boxes covers each element, which can only be one. No pairs are compared.
    """
    full = [box for box in boxes if math.prod(box.shape)]
    if sum(math.prod(box.shape) for box in full) != math.prod(whole):
        return False
    cut = [dimension for dimension, size in enumerate(whole) if any(box.shape[dimension] != size for box in full)]
    if len(full) <= 1:
        return True
    if len(cut) > _MOST_CUTS:
        return False
    odd: set[tuple[int, ...]] = set()
    for box in full:
        ends = ((box.offsets[each], box.offsets[each] + box.shape[each]) for each in cut)
        odd.symmetric_difference_update(itertools.product(*ends))
    return odd == set(itertools.product(*((0, whole[each]) for each in cut)))
