"""Restore a checkpoint, or a part of it: everything is compared and prepared before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dalsegno.checkpoint.compatibility import Change, Value, compare, raise_if_incompatible
from dalsegno.checkpoint.contract import LoadTarget, ShardedState
from dalsegno.checkpoint.frozen_checksums import find_other_base
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.names import CALLBACKS, SETTINGS
from dalsegno.checkpoint.optimizer_state import OptimizerState
from dalsegno.checkpoint.sidecar import SavedState, SavedStates
from dalsegno.checkpoint.tensor_files import name_of
from dalsegno.checkpoint.tensor_reader import Files, PlannedLoad
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import DalsegnoError, StateMismatch
from dalsegno.stateful.component import Component, State, short_class_name
from dalsegno.system.machine import boot_id, host_name


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of a load, by the keys of components: ``restored``; ``fresh``, which the checkpoint does not contain and
    stay as built; ``carried``, which no component claimed and go into the next checkpoints. ``changes``: first those
    that ``allow_changes=`` let pass, then those that make the run inexact. ``notes``: further sentences for the
    user."""

    restored: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        rows = [
            *(("restored", key) for key in self.restored),
            *(("new", key) for key in self.fresh),
            *(("carried forward", key) for key in self.carried),
            *(row for change in self.changes for row in _rows(change)),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{what:<16} {which}".rstrip() for what, which in rows)


def _rows(change: Change) -> list[tuple[str, str]]:
    what = {"error": "changed, allowed", "warning": "changed, beware", "info": "changed"}[change.severity]
    return [(what, str(change)), *(("", f"  {line}") for line in change.details)]


def refuse_changed_callbacks(saved: SavedStates, present: Iterable[Sequence[str]]) -> None:
    """Raises StateMismatch if a stateful callback was added or removed since the save. ``present``: the keys of each
    component of this run, its present key first."""
    here = [keys for keys in present if keys[0].startswith(CALLBACKS)]
    taken = {key for keys in here for key in keys}
    complaints = [
        *(f"{key}: saved, but not here" for key in saved if key.startswith(CALLBACKS) and key not in taken),
        *(f"{keys[0]}: here, but not saved" for keys in here if not any(key in saved for key in keys)),
    ]
    if complaints:
        raise StateMismatch(
            f"{saved.path}: the callbacks differ from those it was saved with (strict_callbacks=True):\n  "
            + "\n  ".join(complaints)
        )


def prepare_components(
    saved: SavedStates,
    components: Sequence[Component],
    report: LoadReport,
    adapt: Mapping[str, Callable[[State], State]],
) -> list[tuple[Component, State]]:
    """Pair each component with its saved state, upgraded to its present version and adapted; nothing is loaded yet.
    Components without a saved state, and notes, are added to ``report``."""
    found = []
    for component in components:
        key = next((key for key in component.keys if key in saved), None)
        if key is None:
            report.fresh.append(component.key)
            continue
        with add_context(f"{saved.path}: {key}"):
            state = _state_for(component, saved, key, report)
            state = adapt[component.key](state) if component.key in adapt else state
            component.check_fit(state)
        found.append((component, state))
    return found


def restore_components(saved: SavedStates, prepared: Iterable[tuple[Component, State]], report: LoadReport) -> None:
    for component, state in prepared:
        with add_context(f"{saved.path}: {component.key}"):
            component.target.load_state_dict(state)
        report.restored.append(component.key)


def unclaimed_states(
    saved: SavedStates, sharded: Sequence[ShardedState], components: Sequence[Component], report: LoadReport
) -> Mapping[str, SavedState]:
    """States that no component claims, for rank 0 to save again."""
    taken = {each.key for each in sharded} | {key for component in components for key in component.keys}
    for key in (key for key in saved if key not in taken):
        if saved.record(key).scope == "sharded":
            report.notes.append(f"{key}: is in the checkpoint, but nothing takes it; it is not carried forward")
        else:
            report.carried.append(key)
    return {key: saved.carried(key) for key in report.carried} if collectives.rank() == 0 else {}


@contextmanager
def add_context(where: str) -> Iterator[None]:
    """Name ``where``, a checkpoint and a component in it, in what is raised inside. An arbitrary exception becomes
    StateMismatch: a state may have the right form and still not fit. Errors that say nothing about a state keep their
    type."""
    try:
        yield
    except (DalsegnoError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(f"while restoring {where}")
        raise
    except Exception as error:
        raise StateMismatch(f"{where}: the saved state was refused: {type(error).__name__}: {error}") from error


def _state_for(component: Component, saved: SavedStates, key: str, report: LoadReport) -> State:
    version, numbers, layout = saved.record(key).version, saved.of_data_ranks(key), saved.layout
    if key != component.key:
        report.notes.append(f"{component.key}: found under its former key {key}")
    if component.scope == "replicated" and saved.count(key) > 1:
        raise StateMismatch(
            f"{component.key}: its saved state is per rank ({saved.count(key)} ranks), now it is replicated; "
            f"set state_scope = 'per_rank', or give it another name to start it anew"
        )
    if version < component.version:
        report.notes.append(f"{component.key}: upgraded from version {version} to {component.version}")

    def state_of(number: int) -> State:
        state = component.upgrade(saved.state(key, number), version)
        component.check_form(state, f"{saved.path}: {key}")
        return state

    if component.scope == "replicated" or saved.record(key).scope != "per_rank":
        return state_of(0)
    own = saved.own(key)
    if own is not None:
        return state_of(own)
    if len(numbers) == layout.data_size:
        return state_of(numbers[layout.data_rank])
    states = [state_of(number) for number in numbers]
    resharded = component.reshard(states, layout.data_size)
    if len(resharded) != layout.data_size:
        raise StateMismatch(
            f"{component.key}: reshard returned {len(resharded)} states for {layout.data_size} ranks; return one per "
            "rank, or per group of ranks that read the same data"
        )
    how = getattr(component.target, "reshard_note", "")
    count = f"from {len(numbers)} to {layout.data_size} states"
    report.notes.append(f"{component.key}: resharded {count}{how and f': {how}'}")
    return resharded[layout.data_rank]


def restore(
    saved: SavedStates,
    sharded: Sequence[ShardedState],
    components: Sequence[Component],
    *,
    strict_callbacks: bool = False,
    settings: Mapping[str, Value] | None = None,
    allowed: Collection[str] = (),
    adapt: Mapping[str, Callable[[State], State]] | None = None,
    any_dtype: bool = False,
    carried: dict[str, SavedState] | None = None,
) -> LoadReport:
    """Restore everything that is given; arguments as of :meth:`CheckpointManager.load`. Collective. ``any_dtype``: cast
    tensors of another dtype. ``carried``: receives the states that no component claims; None: they are not read."""
    if strict_callbacks:
        refuse_changed_callbacks(saved, [*(each.keys for each in components), *((each.key,) for each in sharded)])
    report = LoadReport()

    def prepare() -> tuple[StoredTensors, list[ShardedState], list[tuple[Component, State]]]:
        stored = StoredTensors.of(saved)
        report.changes.extend(find_mismatches(stored, sharded, any_dtype=any_dtype))
        if settings is not None and SETTINGS in saved:
            with add_context(f"{saved.path}: {SETTINGS}"):
                report.changes.extend(compare(saved.state(SETTINGS), settings))
        raise_if_incompatible(report.changes, allowed, saved.path)
        _check_scopes(saved, sharded, components)
        replaced = {change.setting for change in report.changes if change.saved != change.now}  # by another class
        known = [each for each in sharded if each.key in stored.rests and each.key not in replaced]
        report.fresh.extend(each.key for each in sharded if each not in known)
        found = prepare_components(saved, components, report, adapt or {})
        if carried is not None:
            carried.update(unclaimed_states(saved, sharded, components, report))
        return stored, known, found

    (stored, known, prepared), is_one_host = collectives.run_and_compare(prepare, lambda _: boot_id() or host_name())
    report.changes.extend(find_other_base(saved.checkpoint, stored.index, stored.rests, sharded))
    raise_if_incompatible(report.changes, allowed, saved.path)

    def begin() -> ShardedLoad:
        restore_components(saved, (each for each in prepared if each[0].precedes_tensors), report)
        return ShardedLoad(stored, known, shares=not is_one_host)

    tensors, share_alike = collectives.run_and_compare(begin, lambda tensors: tensors.shared)
    if not share_alike:
        collectives.run_on_all_ranks(tensors.read_all)
    tensors.fetch()

    collectives.run_on_all_ranks(tensors.run)  # before what callbacks load, which may be collective
    report.restored.extend(tensors.targets)

    def load_components() -> None:
        restore_components(saved, (each for each in prepared if not each[0].precedes_tensors), report)

    collectives.run_on_all_ranks(load_components)
    report.notes.extend(tensors.casts())
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
    Raises StateMismatch before anything is changed, if a state does not fit its component."""
    return restore(SavedStates(checkpoint, layout), sharded, components, allowed=allowed, any_dtype=True)


def _check_scopes(saved: SavedStates, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
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
    """Stored state of model and optimizer, in a checkpoint or in another library's files at ``origin``: the non-tensor
    ``rests`` and the ``classes``, where known, by component."""

    origin: Path
    files: Files
    index: Index
    rests: Mapping[str, State]
    classes: Mapping[str, str]

    @classmethod
    def of(cls, saved: SavedStates) -> StoredTensors:
        keys = [key for key in saved if saved.record(key).scope == "sharded"]
        return cls(
            saved.path,
            saved.checkpoint,
            Index.of_checkpoint(saved.checkpoint),
            {key: saved.state(key) for key in keys},
            {key: saved.record(key).class_name for key in keys},
        )


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


class ShardedLoad(PlannedLoad):
    """Loads all that fits, at any number of ranks that saved. Nothing is changed before :meth:`run`."""

    def __init__(self, stored: StoredTensors, sharded: Sequence[ShardedState], *, shares: bool = False) -> None:
        self._stored = stored
        self.targets: dict[str, LoadTarget] = {}
        for each in sharded:
            with add_context(f"{stored.origin}: {each.key}"):
                self.targets[each.key] = each.prepare(stored.index, stored.rests[each.key])
        tensors = {key: each.tensors for key, each in self.targets.items()}
        super().__init__(tensors, stored.files, stored.index, shares=shares)

    def run(self) -> None:
        super().run()
        for key, each in self.targets.items():
            with add_context(f"{self._stored.origin}: {key}"):
                each.commit()

    def casts(self) -> list[str]:
        """A note for each pair of dtypes."""
        notes = []
        for key, target in self.targets.items():
            stored = self._stored.index.of(key)
            pairs = Counter((stored[name].dtype, tensor.dtype) for name, tensor in target.tensors.items())
            notes += [
                f"{key}: cast {count} tensor(s) from {name_of(was)} to {name_of(now)}"
                for (was, now), count in pairs.items()
                if was != now
            ]
        return notes
