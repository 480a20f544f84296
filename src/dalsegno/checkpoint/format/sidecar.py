"""Sidecars: the state of everything but tensors of model and optimizer, as JSON with a file of tensors beside it.

``shared`` holds what is the same on all ranks, ``rank-00000`` … what each rank has for itself::

    {"format": 1, "states": {
        "callbacks.MyCb": {"class": "me.MyCb", "version": 1, "scope": "replicated", "states": [{"seen": 3}]}, …}}

``states`` has one state; or, for a per-rank state that found no taker when its checkpoint was loaded and so lies in
``shared`` until one comes, one for each rank of those days.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import torch
import xxhash

from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Count, Must, check

from . import names
from .codec import Arrays, Json, decode, encode
from .layout import StoredFile, as_bytes
from .manifest import Checkpoint, ComponentRecord, read_json

FORMAT = 1


SidecarEntry = TypedDict(
    "SidecarEntry",
    {
        "class": str,
        "version": Count,
        "scope": Literal["replicated", "per_rank", "sharded"],
        "states": Annotated[list[Any], Must("one state at least", len)],
    },
)


class SidecarFile(TypedDict):
    """What the JSON holds."""

    format: Literal[1]
    states: dict[str, SidecarEntry]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A component's state as a checkpoint holds it: one, or one for each rank that saved."""

    record: ComponentRecord
    states: Sequence[State]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A component's state, through the codec. The arrays may still be the component's own memory."""

    record: ComponentRecord
    states: list[tuple[Json, Arrays]]

    @classmethod
    def of(cls, key: str, saved: SavedState) -> Encoded:
        """Raises CannotSave where the codec refuses."""
        return cls(saved.record, [encode(state, key) for state in saved.states])

    def named_arrays(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every array under the name that it has in the sidecar's file."""
        for number, (_, arrays) in enumerate(self.states):
            for path, tensor in arrays.items():
                yield _array_name(key, number, path), tensor

    def checksum(self) -> str:
        """Equal on two ranks if the state is, bit by bit."""
        checksum = xxhash.xxh3_128(json.dumps([each for each, _ in self.states]).encode())
        for _, tensor in self.named_arrays(""):
            checksum.update(as_bytes(tensor.cpu()).numpy().data)
        return checksum.hexdigest()


def sidecar_json(encoded: Mapping[str, Encoded]) -> bytes:
    """The JSON of a sidecar."""
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
    """The tensors beside it, by the name that each has there."""
    return dict(pair for key, each in encoded.items() for pair in each.named_arrays(key))


def read_sidecar(checkpoint: Checkpoint, name: str) -> dict[str, SavedState]:
    """Every state in a sidecar of a verified checkpoint.

    Raises:
        DamagedCheckpoint: if it is not one that dalsegno can have written.
    """
    path = checkpoint.file(names.sidecar_states(name))
    content = read_json(path)
    arrays_name = names.sidecar_tensors(name)
    stored = StoredFile(checkpoint.file(arrays_name)) if arrays_name in checkpoint.manifest.files else None
    spans = stored.spans() if stored else {}

    def decoded(json: Json, key: str, number: int) -> State:
        def read_array(array: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
            span = spans.get(_array_name(key, number, array))
            if stored is None or span is None:
                raise DamagedCheckpoint(f"{path}: the tensor {array!r} of {key} is not beside it")
            return stored.tensor(span, dtype, shape)

        return decode(json, read_array, key)

    check(content, SidecarFile, str(path), DamagedCheckpoint)
    found = {}
    for key, entry in content["states"].items():
        record = ComponentRecord(entry["class"], entry["version"], entry["scope"])
        if checkpoint.manifest.components.get(key) != record:
            raise DamagedCheckpoint(f"{path}: {key} is not the component that the manifest names so")
        states = [decoded(each, key, number) for number, each in enumerate(entry["states"])]
        found[key] = SavedState(record, states)
    return found


def _array_name(key: str, number: int, path: str) -> str:
    return f"{key}@{number}/{path}" if number else f"{key}/{path}"
