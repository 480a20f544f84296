"""A checkpoint loaded into a run, or a part of it: all is compared and prepared before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dalsegno.checkpoint.compatibility import Value, raise_if_incompatible
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.state.sharded import ShardedState
from dalsegno.distributed import collectives
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Component, State

from .states import (
    LoadReport,
    SavedStates,
    prepare_components,
    refuse_changed_callbacks,
    restore_components,
)
from .tensors import StoredTensors, changed_settings, find_mismatches, restore_sharded


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
    allowed: Collection[str] = (),
) -> LoadReport:
    """Restore these only from a verified checkpoint, say the model. Tensors of another type are cast. Collective.

    Raises:
        StateMismatch: before anything is changed, if a state does not fit what it is for.
        DamagedCheckpoint: if a file holds what dalsegno cannot have written.
    """
    saved, report = SavedStates(checkpoint), LoadReport()
    stored = StoredTensors.of(saved)
    report.changes.extend(collectives.run_on_all_ranks(lambda: find_mismatches(stored, sharded, any_dtype=True)))
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
    """Load what fits, and write into ``report`` what it was."""
    _expect_scopes(saved, sharded, components)
    replaced = {change.setting for change in report.changes if change.saved != change.now}  # by another class
    known = [each for each in sharded if each.key in stored.rests and each.key not in replaced]
    report.fresh.extend(each.key for each in sharded if each not in known)
    prepared = prepare_components(saved, components, report, adapt)
    report.notes.extend(restore_sharded(stored, known))
    report.restored.extend(each.key for each in known)
    restore_components(saved, prepared, report)


def _expect_scopes(saved: SavedStates, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
    """
    Raises:
        StateMismatch: if what is spread over the ranks was saved as what is not, or the other way round.
    """
    spread = {each.key for each in sharded}
    for key in [*spread, *(key for each in components for key in each.keys)]:
        if key in saved and (saved.record(key).scope == "sharded") != (key in spread):
            raise StateMismatch(
                f"{saved.path}: {key}: was saved as {saved.record(key).scope}, and now its tensors are "
                f"{'spread over the ranks' if key in spread else 'in its state_dict'}; give it another name"
            )
