"""Model and optimizer as they lie on disk, in a checkpoint or elsewhere: whether they fit, and loading what does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint.compatibility import Change, Value, compare
from dalsegno.checkpoint.format.index import Index, index_of
from dalsegno.checkpoint.format.keys import SETTINGS
from dalsegno.checkpoint.format.layout import name_of
from dalsegno.checkpoint.state.sharded import LoadTarget, OptimizerState, ShardedState
from dalsegno.distributed import collectives
from dalsegno.stateful.component import State

from . import dcp_reader
from .dcp_reader import Files
from .states import SavedStates, blaming


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """What is there to be loaded into model and optimizer.

    Attributes:
        origin: the checkpoint, or other weights; for messages.
        files: where the tensors lie.
        index: the tensors.
        rests: what is no tensor, for each part that is there, by its key.
        classes: of what each part was saved, where that is known.
    """

    origin: Path
    files: Files
    index: Index
    rests: Mapping[str, State]
    classes: Mapping[str, str]

    @classmethod
    def of(cls, saved: SavedStates) -> StoredTensors:
        """Those of a verified checkpoint. Collective."""
        keys = [key for key in saved if saved.record(key).scope == "sharded"]

        def read() -> StoredTensors:
            return cls(
                saved.path,
                saved.checkpoint,
                index_of(saved.checkpoint),
                {key: saved.state(key) for key in keys},
                {key: saved.record(key).class_name for key in keys},
            )

        return collectives.run_on_all_ranks(read)


def find_mismatches(stored: StoredTensors, sharded: Sequence[ShardedState], *, any_dtype: bool = False) -> list[Change]:
    """Which parts do not fit what is stored for them, tensor by tensor. ``any_dtype``: one may be cast to another."""
    found: list[Change] = []
    for each in sharded:
        if each.key not in stored.rests:
            continue
        was, now = stored.classes.get(each.key, each.class_name), each.class_name
        rest, where = stored.rests[each.key], f"{stored.origin}: {each.key}"
        with blaming(where):
            if _kind(was) == _kind(now):
                each.check_rest(stored.index, rest, where)
            lines = each.differences(stored.index, rest, any_dtype=any_dtype)
        if each.key == OptimizerState.key and _kind(was) != _kind(now):
            found.append(Change.of_part(each.key, was, now))
        elif lines and not found:  # an optimizer of a model that does not fit does not fit either
            found.append(Change.of_part(each.key, now, now, lines))
    return found


def changed_settings(saved: SavedStates, now: Mapping[str, Value]) -> list[Change]:
    """What the run is trained with otherwise than when the checkpoint was saved."""
    if SETTINGS not in saved:
        return []
    with blaming(f"{saved.path}: {SETTINGS}"):
        return compare(saved.state(SETTINGS), now)


def restore_sharded(stored: StoredTensors, sharded: Sequence[ShardedState]) -> list[str]:
    """Load what fits of each part, whatever the number of ranks that saved it; says what was cast. Collective."""

    def prepare() -> dict[str, LoadTarget]:
        prepared = {}
        for each in sharded:
            with blaming(f"{stored.origin}: {each.key}"):
                prepared[each.key] = each.prepare(stored.index, stored.rests[each.key])
        return prepared

    prepared = collectives.run_on_all_ranks(prepare)
    dcp_reader.load({key: each.tensors for key, each in prepared.items()}, stored.files, stored.index)

    def take_over() -> None:
        for key, each in prepared.items():
            with blaming(f"{stored.origin}: {key}"):
                each.commit()

    collectives.run_on_all_ranks(take_over)
    return [note for key, each in prepared.items() for note in _casts(key, each, stored.index)]


def _casts(key: str, prepared: LoadTarget, stored: Index) -> list[str]:
    there = stored.of(key)
    pairs = Counter((there[name].dtype, tensor.dtype) for name, tensor in prepared.tensors.items())
    return [
        f"{key}: {count} tensor(s) were {name_of(was)} and are {name_of(now)} here: cast"
        for (was, now), count in pairs.items()
        if was != now
    ]


def _kind(class_name: str) -> str:
    """A class without the modules between, which a library may rename: ``torch.AdamW``."""
    return f"{class_name.partition('.')[0]}.{class_name.rpartition('.')[2]}"
