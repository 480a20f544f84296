"""Giving saved states back to components under their keys, and what came of it; whatever is left goes to nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dalsegno.checkpoint.compatibility import Change
from dalsegno.checkpoint.format.keys import CALLBACKS
from dalsegno.checkpoint.format.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.format.sidecar import SHARED, SavedState, rank_sidecar, read_sidecar
from dalsegno.distributed import collectives
from dalsegno.errors import DalsegnoError, DamagedCheckpoint, StateMismatch
from dalsegno.stateful.component import Component, State


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of each component when a checkpoint was loaded.

    Attributes:
        restored: keys of those that have their saved state again.
        fresh: keys of those that the checkpoint knows nothing of; they stay as they were built.
        carried: keys of saved states that nobody took; they go into the next checkpoints.
        changes: what the user has changed since the checkpoint was saved: first what was let pass by
            ``allow_changes=``, then what makes it another course, then the rest.
        notes: what else is worth saying, a sentence each.
    """

    restored: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The report as lines of text; rows without content are left out."""
        rows = [
            *(("restored", key) for key in self.restored),
            *(("new", key) for key in self.fresh),
            *(("carried forward", key) for key in self.carried),
            *(row for change in self.changes for row in _rows(change)),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{what:<16} {which}".rstrip() for what, which in rows)


def _rows(change: Change) -> list[tuple[str, str]]:
    what = {"refused": "changed, allowed", "warned": "changed, beware", "said": "changed"}[change.verdict]
    return [(what, str(change)), *(("", f"  {line}") for line in change.details)]


class SavedStates:
    """The sidecars of a verified checkpoint, each read when it is first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
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
        """How many states there are under ``key``: one, or one for each rank that saved."""
        if self.record(key).scope != "per_rank":
            return 1
        shared = self._sidecar(SHARED)
        return len(shared[key].states) if key in shared else self.checkpoint.manifest.world_size

    def state(self, key: str, number: int = 0) -> State:
        """The state of that number."""
        sidecar, position = self._sidecar(SHARED), number
        if key not in sidecar:
            sidecar, position = self._sidecar(rank_sidecar(number)), 0
        if key not in sidecar or position >= len(sidecar[key].states):
            raise DamagedCheckpoint(f"{self.checkpoint.path}: the manifest names {key}, but it is not there")
        return sidecar[key].states[position]

    def all_of(self, key: str) -> SavedState:
        return SavedState(self.record(key), [self.state(key, number) for number in range(self.count(key))])

    def _sidecar(self, name: str) -> dict[str, SavedState]:
        if name not in self._read:
            self._read[name] = read_sidecar(self.checkpoint, name)
        return self._read[name]


def refuse_changed_callbacks(saved: SavedStates, present: Iterable[Sequence[str]]) -> None:
    """
    Args:
        saved: what the checkpoint has.
        present: the keys of each component that is here, the present one first.

    Raises:
        StateMismatch: if a callback with a state has come or gone since; all are named.
    """
    here = [keys for keys in present if keys[0].startswith(CALLBACKS)]
    taken = {key for keys in here for key in keys}
    complaints = [
        *(f"{key}: saved, but not here" for key in saved if key.startswith(CALLBACKS) and key not in taken),
        *(f"{keys[0]}: here, but not saved" for keys in here if not any(key in saved for key in keys)),
    ]
    if complaints:
        raise StateMismatch(
            f"{saved.path}: other callbacks than when it was saved (strict_callbacks=True):\n  "
            + "\n  ".join(complaints)
        )


def prepare_components(
    saved: SavedStates,
    components: Sequence[Component],
    report: LoadReport,
    adapt: Mapping[str, Callable[[State], State]],
) -> list[tuple[Component, State]]:
    """Each component with the state that it is to be given, as its present version writes it; nothing is loaded yet.

    Collective. Writes into ``report`` which had one. ``adapt``: what a component's state goes through, by its key.

    Raises:
        StateMismatch: if a state cannot be made to fit.
    """

    def prepare() -> list[tuple[Component, State]]:
        found = []
        for component in components:
            key = next((key for key in component.keys if key in saved), None)
            if key is None:
                report.fresh.append(component.key)
                continue
            with blaming(f"{saved.path}: {key}"):
                state = _state_for(component, saved, key, report)
                state = adapt[component.key](state) if component.key in adapt else state
                component.check_fit(state)
            found.append((component, state))
        return found

    return collectives.run_on_all_ranks(prepare)


def restore_components(saved: SavedStates, prepared: Sequence[tuple[Component, State]], report: LoadReport) -> None:
    """Give each component the state that was prepared for it. Collective.

    Raises:
        StateMismatch: if one does not take it. Others have theirs by then.
    """

    def restore() -> None:
        for component, state in prepared:
            with blaming(f"{saved.path}: {component.key}"):
                component.target.load_state_dict(state)
            report.restored.append(component.key)

    collectives.run_on_all_ranks(restore)


def unclaimed_states(
    saved: SavedStates, components: Sequence[Component], report: LoadReport
) -> Mapping[str, SavedState]:
    """The states that no component takes, for rank 0 to save again. Their keys go into ``report``. Collective."""
    taken = {key for component in components for key in component.keys}
    report.carried.extend(key for key in saved if key not in taken and saved.record(key).scope != "sharded")
    return collectives.run_on_all_ranks(
        lambda: {key: saved.all_of(key) for key in report.carried} if collectives.rank() == 0 else {}
    )


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """What is raised inside names ``where``, a checkpoint and a component in it.

    A state may be of the right form, and all the same nothing that its component takes. What says nothing about a
    state (a disk that does not answer, memory that is used up) keeps its type.
    """
    try:
        yield
    except (DalsegnoError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(f"while {where} was being restored")
        raise
    except Exception as error:
        raise StateMismatch(f"{where}: the saved state is not taken back: {type(error).__name__}: {error}") from error


def _state_for(component: Component, saved: SavedStates, key: str, report: LoadReport) -> State:
    """This rank's state, in the component's present version; what is worth saying about it goes into ``report``."""
    version, count, world_size = saved.record(key).version, saved.count(key), collectives.world_size()
    if key != component.key:
        report.notes.append(f"{component.key}: found under its former key {key}")
    if component.scope == "replicated" and count > 1:
        raise StateMismatch(
            f"{component.key}: its saved state is per rank ({count} ranks), now it is replicated; "
            f"set state_scope = 'per_rank', or give it another name to start it anew"
        )
    if version < component.version:
        report.notes.append(f"{component.key}: upgraded from version {version} to {component.version}")

    def state_of(number: int) -> State:
        state = component.upgrade(saved.state(key, number), version)
        component.check_form(state, f"{saved.path}: {key}")
        return state

    if count == 1 and saved.record(key).scope != "per_rank":
        return state_of(0)
    if count == world_size:
        return state_of(collectives.rank() if component.scope == "per_rank" else 0)
    states = [state_of(number) for number in range(count)]
    resharded = component.reshard(states, world_size)
    if len(resharded) != world_size:
        raise StateMismatch(
            f"{component.key}: reshard gave {len(resharded)} states for {world_size} ranks; it must give one for each"
        )
    how = getattr(component.target, "reshard_note", "")
    report.notes.append(f"{component.key}: its {count} states became {world_size}{how and f': {how}'}")
    return resharded[collectives.rank()]
