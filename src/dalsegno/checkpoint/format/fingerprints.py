"""Fingerprints: checksums of the frozen parameters that a checkpoint does not contain, in ``model/frozen-00000.json``.

::

    {"format": 1, "tensors": {"0.weight": {"offsets": [0, 0], "shape": [4, 2], "xxh3": "…32 hex digits…"}, …}}

Each rank writes those of the chunks that it would have saved. A checksum is the xxh3-128 of a chunk's elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import torch
import xxhash

from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.schema import Must, check
from dalsegno.system import filesystem

from . import names
from .index import Index
from .layout import as_bytes, is_shape
from .manifest import Checkpoint, read_json

FORMAT = 1


class FingerprintEntry(TypedDict):
    offsets: Annotated[list[Any], Must("a list of dimensions", is_shape)]
    shape: Annotated[list[Any], Must("a list of dimensions", is_shape)]
    xxh3: str


class FingerprintFile(TypedDict):
    """Content of a file."""

    format: Literal[1]
    tensors: dict[str, FingerprintEntry]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Checksum of the box of ``shape`` at ``offsets`` in a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3: str

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether that box of a full tensor has this checksum."""
        box = tensor
        for dimension, (begin, length) in enumerate(zip(self.offsets, self.shape, strict=True)):
            box = box.narrow(dimension, begin, length)
        return checksum_of(box) == self.xxh3


def checksum_of(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's elements, on any device. Copies one piece at a time."""
    checksum = xxhash.xxh3_128()
    for piece in torch.split(as_bytes(tensor), filesystem.DIRECT_PIECE):
        checksum.update(piece.cpu().numpy().data)
    return checksum.hexdigest()


def to_bytes(fingerprints: Mapping[str, Fingerprint]) -> bytes:
    """Content of a file, by the names of the tensors in their component."""
    tensors = {
        name: {"offsets": each.offsets, "shape": each.shape, "xxh3": each.xxh3} for name, each in fingerprints.items()
    }
    return json.dumps({"format": FORMAT, "tensors": tensors}, separators=(",", ":")).encode()


def read_fingerprints(checkpoint: Checkpoint, index: Index) -> dict[str, Sequence[Fingerprint]]:
    """The fingerprints of each tensor that ``index`` lists as absent, by ``<component>.<name>``.

    Raises:
        DamagedCheckpoint: if a file is invalid, or the fingerprints of a tensor do not cover it.
    """
    found: dict[str, list[Fingerprint]] = {}
    for file in names.fingerprints_among(checkpoint.manifest.files):
        path = checkpoint.file(file)
        content = read_json(path)
        check(content, FingerprintFile, str(path), DamagedCheckpoint)
        for name, entry in content["tensors"].items():
            fingerprint = Fingerprint(tuple(entry["offsets"]), tuple(entry["shape"]), entry["xxh3"])
            found.setdefault(f"{file.partition('/')[0]}.{name}", []).append(fingerprint)
    for name, stored in index.absent.items():
        boxes = found.get(name, [])
        elements = sum(math.prod(each.shape) for each in boxes)
        if elements != math.prod(stored.shape) or not all(_is_inside(each, stored.shape) for each in boxes):
            raise DamagedCheckpoint(f"{checkpoint.path}: the fingerprints of {name} do not cover it")
    return {name: found.get(name, []) for name in index.absent}


def _is_inside(box: Fingerprint, whole: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.shape) == len(whole) and all(
        begin + size <= limit for begin, size, limit in zip(box.offsets, box.shape, whole, strict=True)
    )
