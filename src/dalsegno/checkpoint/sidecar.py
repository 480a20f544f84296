"""Sidecars: all state except the tensors of model and optimizer, as JSON with a file of tensors beside it.

``shared`` contains state that all ranks share, ``rank-00000`` … the state of one rank::

    {"format": 1, "states": {
        "callbacks.MyCb": {"class": "me.MyCb", "version": 1, "scope": "replicated", "states": [{"seen": 3}]}, …}}

``states`` has one state. A per-rank state that no component claimed at a load is carried forward in
``shared``, with one state per rank that saved it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import torch
import xxhash

from dalsegno.checkpoint import names
from dalsegno.checkpoint.codec import Arrays, Json, decode, encode
from dalsegno.checkpoint.file_reading import read_json
from dalsegno.checkpoint.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.names import SHARED, rank_sidecar
from dalsegno.checkpoint.tensor_files import StoredFile, as_bytes
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Count, Must, check

FORMAT = 1


SidecarEntry = TypedDict(
    "SidecarEntry",
    {
        "class": str,
        "version": Count,
        "scope": Literal["replicated", "per_rank", "sharded"],
        "states": Annotated[list[Any], Must("at least one state", len)],
    },
)


class SidecarFile(TypedDict):
    """Content."""

    format: Literal[1]
    states: dict[str, SidecarEntry]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A component's state in a checkpoint: one state, or one per rank that saved."""

    record: ComponentRecord
    states: Sequence[State]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A component's state, encoded. The arrays may still share memory with the component."""

    record: ComponentRecord
    states: list[tuple[Json, Arrays]]

    @classmethod
    def of(cls, key: str, saved: SavedState) -> Encoded:
        return cls(saved.record, [encode(state, key) for state in saved.states])

    def named_arrays(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (_, arrays) in enumerate(self.states):
            for path, tensor in arrays.items():
                yield _array_name(key, number, path), tensor

    def checksum(self) -> str:
        """Equal on two ranks if their states are equal bit by bit."""
        checksum = xxhash.xxh3_128(json.dumps([each for each, _ in self.states]).encode())
        for _, tensor in self.named_arrays(""):
            checksum.update(as_bytes(tensor.cpu()).numpy().data)
        return checksum.hexdigest()


def sidecar_json(encoded: Mapping[str, Encoded]) -> bytes:
    states = {
        key: {
            "class": each.record.class_name,
            "version": each.record.version,
            "scope": each.record.scope,
            "states": [state for state, _ in each.states],
        }
        for key, each in encoded.items()
    }
    text = json.dumps({"format": FORMAT, "states": states}, allow_nan=False, separators=(",", ":"))
    return text.encode()


def sidecar_arrays(encoded: Mapping[str, Encoded]) -> dict[str, torch.Tensor]:
    return dict(pair for key, each in encoded.items() for pair in each.named_arrays(key))


def read_sidecar(checkpoint: Checkpoint, name: str) -> dict[str, SavedState]:
    path = checkpoint.file(names.sidecar_states(name))
    content = read_json(path)
    arrays_name = names.sidecar_tensors(name)
    stored = StoredFile(checkpoint.file(arrays_name)) if arrays_name in checkpoint.manifest.files else None
    spans = stored.spans() if stored else {}

    def decoded(json: Json, key: str, number: int) -> State:
        def read_array(array: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
            span = spans.get(_array_name(key, number, array))
            if stored is None or span is None:
                raise DamagedCheckpoint(f"{path}: the tensor {array!r} of {key} is missing")
            return stored.tensor(span, dtype, shape)

        return decode(json, read_array, key)

    check(content, SidecarFile, str(path), DamagedCheckpoint)
    found = {}
    for key, entry in content["states"].items():
        record = checkpoint.manifest.components.get(key)
        if record is None or record != ComponentRecord(entry["class"], entry["version"], entry["scope"]):
            raise DamagedCheckpoint(f"{path}: {key} differs from its record in the manifest")
        states = [decoded(each, key, number) for number, each in enumerate(entry["states"])]
        found[key] = SavedState(record, states)
    return found


def _array_name(key: str, number: int, path: str) -> str:
    return f"{key}@{number}/{path}" if number else f"{key}/{path}"


class SavedStates:
    """The states in the sidecars of a verified checkpoint, each read on first use. ``layout``: which ranks read the
    same data now; None: each its own."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout | None = None) -> None:
        self.layout = layout or Layout.flat()
        self.checkpoint = checkpoint
        self.path = checkpoint.path
        self._read: dict[str, dict[str, SavedState]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.checkpoint.manifest.components

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.manifest.components)

    def record(self, key: str) -> ComponentRecord:
        return self.checkpoint.manifest.components[key]

    def count(self, key: str) -> int:
        """Number of states under ``key``: one, or one per rank that saved."""
        if self.record(key).scope != "per_rank":
            return 1
        shared = self._sidecar(SHARED)
        return len(shared[key].states) if key in shared else self.checkpoint.manifest.world_size

    def state(self, key: str, number: int = 0) -> State:
        sidecar, position = self._sidecar(SHARED), number
        if key not in sidecar:
            sidecar, position = self._sidecar(rank_sidecar(number)), 0
        if key not in sidecar or position >= len(sidecar[key].states):
            raise DamagedCheckpoint(f"{self.checkpoint.path}: the manifest names {key}, but no sidecar contains it")
        return sidecar[key].states[position]

    def of_data_ranks(self, key: str) -> list[int]:
        """Numbers of the states that stand for a data rank: all but those of ranks that read the data of a lower
        one."""
        if self.record(key).scope != "per_rank" or key in self._sidecar(SHARED):
            return [*range(self.count(key))]
        return Layout(None, self._data_ranks()).counted

    def own(self, key: str) -> int | None:
        """Number of the state that this rank saved, if the same ranks read the same data then."""
        is_same = self._data_ranks() == self.layout.data_ranks and key not in self._sidecar(SHARED)
        return collectives.rank() if is_same else None

    def _data_ranks(self) -> tuple[int, ...]:
        """The data rank of each rank that saved."""
        manifest = self.checkpoint.manifest
        return tuple(manifest.data_ranks) or tuple(range(manifest.world_size))

    def carried(self, key: str) -> SavedState:
        """One state for each data rank."""
        return SavedState(self.record(key), [self.state(key, number) for number in self.of_data_ranks(key)])

    def _sidecar(self, name: str) -> dict[str, SavedState]:
        if name not in self._read:
            self._read[name] = read_sidecar(self.checkpoint, name)
        return self._read[name]


@check_types
def saved_states(checkpoint: Checkpoint) -> dict[str, list[State]]:
    """Component to its non-tensor states: one, or one per rank that saved. Raises DamagedCheckpoint if a file has
    content that dalsegno cannot have written."""
    saved = SavedStates(checkpoint)
    return {key: [saved.state(key, number) for number in range(saved.count(key))] for key in saved}
