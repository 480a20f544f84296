"""Fingerprints: checksums of the frozen parameters that a checkpoint does not contain, in ``model/frozen-00000.json``.

::

    {"format": 1, "tensors": {"0.weight": {"offsets": [0, 0], "shape": [4, 2], "xxh3": "…32 hex digits…"}, …}}

Each rank writes those of the chunks that it would have saved. A checksum is the xxh3-128 of a chunk's elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

import torch

from dalsegno.checkpoint import names
from dalsegno.checkpoint.compatibility import Change
from dalsegno.checkpoint.contract import Capturable, FrozenNames, ShardedState, Tensors, TensorsByComponent, box_here
from dalsegno.checkpoint.file_reading import read_json
from dalsegno.checkpoint.file_writing import checksum_of_bytes, live_digest
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.model_state import ModelState
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import FileLayout, Shape, TensorChunk, as_bytes, part
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import full_tensor, local_part
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import check

FORMAT = 1


class FingerprintEntry(TypedDict):
    offsets: Shape
    shape: Shape
    xxh3: str


class FingerprintFile(TypedDict):
    """Content."""

    format: Literal[1]
    tensors: dict[str, FingerprintEntry]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    box: Box
    xxh3: str

    def fits(self, tensor: torch.Tensor) -> bool:
        return checksum_of(part(tensor, self.box)) == self.xxh3


def checksum_of(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's elements, on any device."""
    return checksum_of_bytes([as_bytes(tensor)])


def to_bytes(fingerprints: Mapping[str, Fingerprint]) -> bytes:
    tensors = {
        name: {"offsets": each.box.offsets, "shape": each.box.shape, "xxh3": each.xxh3}
        for name, each in fingerprints.items()
    }
    return json.dumps({"format": FORMAT, "tensors": tensors}, separators=(",", ":")).encode()


def read_fingerprints(checkpoint: Checkpoint, index: Index) -> dict[str, dict[str, list[Fingerprint]]]:
    """By component, the fingerprints of each tensor that ``index`` lists as absent, which they must cover."""
    found = {component: {name: list[Fingerprint]() for name in its} for component, its in index.absent.items()}
    for file in names.fingerprints_among(checkpoint.manifest.files):
        path = checkpoint.file(file)
        content = read_json(path)
        check(content, FingerprintFile, str(path), DamagedCheckpoint)
        for name, entry in content["tensors"].items():
            fingerprint = Fingerprint(Box(tuple(entry["offsets"]), tuple(entry["shape"])), entry["xxh3"])
            if name in (of_component := found.get(file.partition("/")[0], {})):
                of_component[name].append(fingerprint)
    for component, its in index.absent.items():
        for name, stored in its.items():
            boxes = [each.box for each in found[component][name]]
            elements = sum(math.prod(box.shape) for box in boxes)
            if elements != math.prod(stored.shape) or not all(box.is_inside(stored.shape) for box in boxes):
                raise DamagedCheckpoint(f"{checkpoint.path}: the fingerprints of {component}.{name} do not cover it")
    return found


def find_other_base(
    checkpoint: Checkpoint, index: Index, rests: Mapping[str, State], sharded: Sequence[ShardedState]
) -> list[Change]:
    """A change for each model whose frozen parameters differ from those that the checkpoint omits, with the first of
    these. ``rests``: saved rest of each component; one without is not compared. Collective: a sharded parameter is
    gathered, one at a time."""
    if not index.absent:
        return []
    fingerprints = collectives.run_on_all_ranks(lambda: read_fingerprints(checkpoint, index))
    changes = []
    for component in sharded:
        if not isinstance(component, ModelState) or component.key not in rests:
            continue
        if absent := component.absent(index, rests[component.key]):
            collectives.run_on_all_ranks(partial(_check_even, component.key, absent))
            others = _differing(absent, fingerprints[component.key])
            of_ranks = collectives.gather(others[:1], "whether the frozen parameters are the same")
            first = min((name for names in of_ranks for name in names), default=None)
            if first is not None:
                line = f'{first}: has other values than the ones that save_frozen="never" left out; use the same base'
                changes.append(Change.of_part(component.key, component.class_name, component.class_name, [line]))
    return changes


def _check_even(component: str, tensors: Tensors) -> None:
    """Gathering a tensor in uneven shards would hang on some ranks."""
    for name, tensor in tensors.items():
        box_here(tensor, f"{component}.{name}")


def _differing(tensors: Tensors, fingerprints: Mapping[str, Sequence[Fingerprint]]) -> list[str]:
    """Names of the tensors that differ, in order. Goes through all of them, since the other ranks do."""
    names = []
    for name in sorted(tensors):
        if is_on_other_stage(tensor := tensors[name]):
            continue
        full = full_tensor(tensor)
        if not all(each.fits(full) for each in fingerprints[name]):
            names.append(name)
    return names


# --- of what is live ------------------------------------------------------------------------------------------------

Checksums = Mapping[str, Mapping[str, str]]
"""Of this rank's part of each tensor, by component and name."""


class FrozenChecksums:
    """Checksums of the frozen parameters as they are when this is built: before a checkpoint is loaded."""

    def __init__(self, sharded: Sequence[Capturable]) -> None:
        captured = {each.key: each.capture() for each in sharded}
        self._checksums: Checksums = {key: _checksums(each.tensors, each.frozen) for key, each in captured.items()}
        self._unchanged: dict[str, tuple[bytes, dict[str, str]]] = {}  # by component, with the digest at that time

    def unchanged(self, tensors: TensorsByComponent, frozen: FrozenNames) -> Checksums:
        """Checksums of the frozen parameters whose part on this rank has not changed since."""
        return {component: self._unchanged_of(component, its, frozen[component]) for component, its in tensors.items()}

    def _unchanged_of(
        self, component: str, tensors: Mapping[str, torch.Tensor], frozen: Collection[str]
    ) -> dict[str, str]:
        digest = _digest(tensors, frozen)
        known, unchanged = self._unchanged.get(component, (b"", {}))
        if digest != known:
            unchanged = dict(_checksums(tensors, frozen).items() & self._checksums.get(component, {}).items())
            self._unchanged[component] = digest, unchanged
        return unchanged


def unchanged_everywhere(checksums: Checksums) -> dict[str, set[str]]:
    """By component, the names that all ranks have in ``checksums``. Collective."""
    of_ranks = collectives.gather({key: {*its} for key, its in checksums.items()}, "what is not saved")
    return {key: set.intersection(*(each[key] for each in of_ranks)) for key in checksums}


def _checksums(tensors: Mapping[str, torch.Tensor], frozen: Collection[str]) -> dict[str, str]:
    return {
        name: "" if is_on_other_stage(tensors[name]) else checksum_of(local_part(tensors[name]))
        for name in sorted(frozen)
    }


def _digest(tensors: Mapping[str, torch.Tensor], frozen: Collection[str]) -> bytes:
    with torch.no_grad():
        parts = {name: local_part(tensors[name]) for name in sorted(frozen) if not is_on_other_stage(tensors[name])}
    layout = FileLayout.of([TensorChunk.entire(name, part) for name, part in parts.items()])
    return live_digest(layout, [*parts.values()])
