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
from typing import Literal, TypedDict

import torch
import xxhash

from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.schema import check
from dalsegno.system import filesystem

from . import names
from .index import Index
from .layout import Shape, as_bytes
from .manifest import Checkpoint, read_json
from .sharding import Box
from .stored_tensors import part

FORMAT = 1


class FingerprintEntry(TypedDict):
    offsets: Shape
    shape: Shape
    xxh3: str


class FingerprintFile(TypedDict):
    """Content of a file."""

    format: Literal[1]
    tensors: dict[str, FingerprintEntry]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Checksum of a part of a tensor."""

    box: Box
    xxh3: str

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether that part of a full tensor has this checksum."""
        return checksum_of(part(tensor, self.box)) == self.xxh3


def checksum_of(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's elements, on any device. Copies one piece at a time."""
    checksum = xxhash.xxh3_128()
    for piece in torch.split(as_bytes(tensor), filesystem.DIRECT_PIECE):
        checksum.update(piece.cpu().numpy().data)
    return checksum.hexdigest()


def to_bytes(fingerprints: Mapping[str, Fingerprint]) -> bytes:
    """Content of a file, by the names of the tensors in their component."""
    tensors = {
        name: {"offsets": each.box.offsets, "shape": each.box.shape, "xxh3": each.xxh3}
        for name, each in fingerprints.items()
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
            fingerprint = Fingerprint(Box(tuple(entry["offsets"]), tuple(entry["shape"])), entry["xxh3"])
            found.setdefault(f"{file.partition('/')[0]}.{name}", []).append(fingerprint)
    for name, stored in index.absent.items():
        boxes = [each.box for each in found.get(name, [])]
        elements = sum(math.prod(box.shape) for box in boxes)
        if elements != math.prod(stored.shape) or not all(box.is_inside(stored.shape) for box in boxes):
            raise DamagedCheckpoint(f"{checkpoint.path}: the fingerprints of {name} do not cover it")
    return {name: found.get(name, []) for name in index.absent}
