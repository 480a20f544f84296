"""Restore a checkpoint, or a part of it: everything is compared and prepared before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.keys import SETTINGS
from dalsegno.checkpoint.format.layout import name_of
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.format.stored_tensors import Files
from dalsegno.checkpoint.state.contract import LoadTarget, ShardedState, short_class_name
from dalsegno.checkpoint.state.optimizer import OptimizerState
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Component, State

from . import tensor_reader
from .compatibility import Change, Value, compare, raise_if_incompatible
from .frozen_base import find_other_base
from .states import (
    LoadReport,
    SavedStates,
    add_context,
    prepare_components,
    refuse_changed_callbacks,
    restore_components,
)


def restore(
    saved: SavedStates,
    sharded: Sequence[ShardedState],
    components: Sequence[Component],
    *,
    strict_callbacks: bool,
    settings: Mapping[str, Value],
    allowed: Collection[str],
    adapt: Mapping[str, Callable[[State], State]],
) -> LoadReport:
    """Restore everything; arguments and errors are those of :meth:`CheckpointManager.load`. Collective."""
    if strict_callbacks:
        refuse_changed_callbacks(saved, [*(each.keys for each in components), *((each.key,) for each in sharded)])
    stored, report = StoredTensors.of(saved), LoadReport()
    report.changes.extend(
        collectives.run_on_all_ranks(lambda: [*find_mismatches(stored, sharded), *changed_settings(saved, settings)])
    )
    report.changes.extend(find_other_base(saved.checkpoint, stored.index, stored.rests, sharded))
    raise_if_incompatible(report.changes, allowed, saved.path)
    _restore(saved, stored, sharded, components, report, adapt)
    for key in stored.rests:
        if key not in {each.key for each in sharded}:
            report.notes.append(f"{key}: is in the checkpoint, but nothing takes it; it is not carried forward")
    return report


def load_parts(
    checkpoint: Checkpoint,
    sharded: Sequence[ShardedState],
    components: Sequence[Component] = (),
    *,
    layout: Layout | None = None,
    allowed: Collection[str] = (),
) -> LoadReport:
    """Restore only these parts of a verified checkpoint, such as the model. Casts tensors of another dtype. Collective.

    Raises:
        StateMismatch: before anything is changed, if a state does not fit its component.
        DamagedCheckpoint: if a file has content that dalsegno cannot have written.
    """
    saved, report = SavedStates(checkpoint, layout), LoadReport()
    stored = StoredTensors.of(saved)
    report.changes.extend(collectives.run_on_all_ranks(lambda: find_mismatches(stored, sharded, any_dtype=True)))
    report.changes.extend(find_other_base(saved.checkpoint, stored.index, stored.rests, sharded))
    raise_if_incompatible(report.changes, allowed, checkpoint.path)
    _restore(saved, stored, sharded, components, report, {})
    return report


def _restore(
    saved: SavedStates,
    stored: StoredTensors,
    sharded: Sequence[ShardedState],
    components: Sequence[Component],
    report: LoadReport,
    adapt: Mapping[str, Callable[[State], State]],
) -> None:
    """Load all that fits, and add the outcome to ``report``."""
    _check_scopes(saved, sharded, components)
    replaced = {change.setting for change in report.changes if change.saved != change.now}  # by another class
    known = [each for each in sharded if each.key in stored.rests and each.key not in replaced]
    report.fresh.extend(each.key for each in sharded if each not in known)
    prepared = prepare_components(saved, components, report, adapt)
    restore_components(saved, [each for each in prepared if each[0].precedes_tensors], report)
    report.notes.extend(restore_sharded(stored, known))
    report.restored.extend(each.key for each in known)
    restore_components(saved, [each for each in prepared if not each[0].precedes_tensors], report)


def _check_scopes(saved: SavedStates, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
    """Raises StateMismatch if a state that was saved as sharded is not sharded now, or the other way round."""
    sharded_keys = {each.key for each in sharded}
    for key in [*sharded_keys, *(key for each in components for key in each.keys)]:
        if key in saved and (saved.record(key).scope == "sharded") != (key in sharded_keys):
            raise StateMismatch(
                f"{saved.path}: {key}: was saved as {saved.record(key).scope}, and now its tensors are "
                f"{'sharded over the ranks' if key in sharded_keys else 'in its state_dict'}; give it another name"
            )


# --- model and optimizer ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Stored state of model and optimizer, in a checkpoint or in another library's files.

    Attributes:
        origin: path of the checkpoint or weights, for messages.
        files: the files of tensors.
        index: the tensors.
        rests: non-tensor state of each component, by its key.
        classes: class name that each component was saved from, where known.
    """

    origin: Path
    files: Files
    index: Index
    rests: Mapping[str, State]
    classes: Mapping[str, str]

    @classmethod
    def of(cls, saved: SavedStates) -> StoredTensors:
        """Read the index and the rests of a verified checkpoint. Collective."""
        keys = [key for key in saved if saved.record(key).scope == "sharded"]

        def read() -> StoredTensors:
            return cls(
                saved.path,
                saved.checkpoint,
                Index.of_checkpoint(saved.checkpoint),
                {key: saved.state(key) for key in keys},
                {key: saved.record(key).class_name for key in keys},
            )

        return collectives.run_on_all_ranks(read)


def find_mismatches(stored: StoredTensors, sharded: Sequence[ShardedState], *, any_dtype: bool = False) -> list[Change]:
    """Components that do not fit their stored state, tensor by tensor. ``any_dtype``: another dtype fits too."""
    found: list[Change] = []
    for each in sharded:
        if each.key not in stored.rests:
            continue
        was, now = stored.classes.get(each.key, each.class_name), each.class_name
        rest, where = stored.rests[each.key], f"{stored.origin}: {each.key}"
        is_same_class = short_class_name(was) == short_class_name(now)
        with add_context(where):
            if is_same_class:
                each.check_rest(stored.index, rest, where)
            lines = each.differences(stored.index, rest, any_dtype=any_dtype)
        if each.key == OptimizerState.key and not is_same_class:
            found.append(Change.of_part(each.key, was, now))
        elif lines and not found:  # an optimizer of a model that does not fit does not fit either
            found.append(Change.of_part(each.key, now, now, lines))
    return found


def changed_settings(saved: SavedStates, now: Mapping[str, Value]) -> list[Change]:
    """Settings of the run that differ from those when the checkpoint was saved."""
    if SETTINGS not in saved:
        return []
    with add_context(f"{saved.path}: {SETTINGS}"):
        return compare(saved.state(SETTINGS), now)


def restore_sharded(stored: StoredTensors, sharded: Sequence[ShardedState]) -> list[str]:
    """Load all that fits, at any number of ranks that saved; returns a note for each cast. Collective."""

    def prepare() -> dict[str, LoadTarget]:
        targets = {}
        for each in sharded:
            with add_context(f"{stored.origin}: {each.key}"):
                targets[each.key] = each.prepare(stored.index, stored.rests[each.key])
        return targets

    targets = collectives.run_on_all_ranks(prepare)
    tensor_reader.load({key: each.tensors for key, each in targets.items()}, stored.files, stored.index)

    def commit() -> None:
        for key, each in targets.items():
            with add_context(f"{stored.origin}: {key}"):
                each.commit()

    collectives.run_on_all_ranks(commit)
    return [note for key, each in targets.items() for note in _casts(key, each, stored.index)]


def _casts(key: str, target: LoadTarget, index: Index) -> list[str]:
    stored = index.of(key)
    pairs = Counter((stored[name].dtype, tensor.dtype) for name, tensor in target.tensors.items())
    return [
        f"{key}: cast {count} tensor(s) from {name_of(was)} to {name_of(now)}"
        for (was, now), count in pairs.items()
        if was != now
    ]
