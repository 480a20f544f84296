"""Non-tensor states of a checkpoint, and restoring components from them under their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dalsegno.checkpoint.format.keys import CALLBACKS
from dalsegno.checkpoint.format.manifest import Checkpoint, ComponentRecord
from dalsegno.checkpoint.format.names import SHARED, rank_sidecar
from dalsegno.checkpoint.format.sidecar import SavedState, read_sidecar
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import DalsegnoError, DamagedCheckpoint, StateMismatch
from dalsegno.stateful.component import Component, State

from .compatibility import Change


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of a load for each component.

    Attributes:
        restored: keys of components that have their saved state again.
        fresh: keys of components that the checkpoint does not contain; they stay as built.
        carried: keys of saved states that no component claimed; they go into the next checkpoints.
        changes: differences between the checkpoint and the present run: first those that ``allow_changes=`` let
            pass, then those that make the run inexact, then the rest.
        notes: further sentences for the user.
    """

    restored: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The report as lines of text, without empty rows."""
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


class SavedStates:
    """The states in the sidecars of a verified checkpoint; each sidecar is read on first use.

    Args:
        checkpoint: verified.
        layout: which ranks read the same data now; None: each its own.
    """

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
        """State ``number`` under ``key``."""
        sidecar, position = self._sidecar(SHARED), number
        if key not in sidecar:
            sidecar, position = self._sidecar(rank_sidecar(number)), 0
        if key not in sidecar or position >= len(sidecar[key].states):
            raise DamagedCheckpoint(f"{self.checkpoint.path}: the manifest names {key}, but no sidecar contains it")
        return sidecar[key].states[position]

    def of_data_ranks(self, key: str) -> list[int]:
        """Numbers of the states under ``key`` that stand for a data rank: all but those of ranks that read the data of
        a lower one."""
        if self.record(key).scope != "per_rank" or key in self._sidecar(SHARED):
            return [*range(self.count(key))]
        return self.checkpoint.manifest.counted

    def own(self, key: str) -> int | None:
        """Number of the state that this rank saved, if the ranks that read the same data are the same as then."""
        then = tuple(self.checkpoint.manifest.data_ranks) or tuple(range(self.checkpoint.manifest.world_size))
        return collectives.rank() if then == self.layout.data_ranks and key not in self._sidecar(SHARED) else None

    def all_of(self, key: str) -> SavedState:
        return self._those(key, range(self.count(key)))

    def carried(self, key: str) -> SavedState:
        """What later checkpoints contain of a state that no component claims: one state for each data rank."""
        return self._those(key, self.of_data_ranks(key))

    def _those(self, key: str, numbers: Iterable[int]) -> SavedState:
        return SavedState(self.record(key), [self.state(key, number) for number in numbers])

    def _sidecar(self, name: str) -> dict[str, SavedState]:
        if name not in self._read:
            self._read[name] = read_sidecar(self.checkpoint, name)
        return self._read[name]


def refuse_changed_callbacks(saved: SavedStates, present: Iterable[Sequence[str]]) -> None:
    """
    Args:
        saved: the checkpoint's states.
        present: the keys of each component of this run, its present key first.

    Raises:
        StateMismatch: if a stateful callback was added or removed since the save; names all of them.
    """
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
    """Pair each component with its saved state, upgraded to its present version; nothing is loaded yet. Collective.

    Args:
        report: receives the components without a saved state, and notes.
        adapt: by component key, a function applied to the state.

    Raises:
        StateMismatch: if a state does not fit.
    """

    def prepare() -> list[tuple[Component, State]]:
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

    return collectives.run_on_all_ranks(prepare)


def restore_components(saved: SavedStates, prepared: Sequence[tuple[Component, State]], report: LoadReport) -> None:
    """Load each prepared state into its component. Collective.

    Raises:
        StateMismatch: if a component refuses its state. Others have loaded theirs by then.
    """

    def restore() -> None:
        for component, state in prepared:
            with add_context(f"{saved.path}: {component.key}"):
                component.target.load_state_dict(state)
            report.restored.append(component.key)

    collectives.run_on_all_ranks(restore)


def unclaimed_states(
    saved: SavedStates, components: Sequence[Component], report: LoadReport
) -> Mapping[str, SavedState]:
    """States that no component claims, for rank 0 to save again. Adds their keys to ``report``. Collective."""
    taken = {key for component in components for key in component.keys}
    report.carried.extend(key for key in saved if key not in taken and saved.record(key).scope != "sharded")
    return collectives.run_on_all_ranks(
        lambda: {key: saved.carried(key) for key in report.carried} if collectives.rank() == 0 else {}
    )


@contextmanager
def add_context(where: str) -> Iterator[None]:
    """Name ``where``, a checkpoint and a component in it, in what is raised inside.

    An arbitrary exception becomes StateMismatch: a state may have the right form and still not fit its component.
    Errors that say nothing about a state (disk, memory) keep their type and get a note.
    """
    try:
        yield
    except (DalsegnoError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(f"while restoring {where}")
        raise
    except Exception as error:
        raise StateMismatch(f"{where}: the saved state was refused: {type(error).__name__}: {error}") from error


def _state_for(component: Component, saved: SavedStates, key: str, report: LoadReport) -> State:
    """This rank's state of ``component``, upgraded and resharded; adds notes to ``report``."""
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
