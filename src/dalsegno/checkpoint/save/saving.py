"""Capturing the state of everything, and writing what was captured."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from dalsegno.checkpoint.format import index, manifest
from dalsegno.checkpoint.format.layout import FileLayout, TensorChunk
from dalsegno.checkpoint.format.manifest import ComponentRecord, FileRecord, Manifest
from dalsegno.checkpoint.format.sidecar import (
    SHARED,
    Encoded,
    SavedState,
    rank_sidecar,
    sidecar_arrays,
    sidecar_json,
)
from dalsegno.checkpoint.state.sharded import ShardedState
from dalsegno.distributed import collectives
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem

from . import planning
from .cuda_copies import CudaCopies
from .planning import FilePlan, Plan
from .resources import available_memory, format_bytes, has_memory_for
from .staging import Advance, BounceBuffers, Buffer, InlineFile, PendingFile, TensorFile

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that this rank adds to a checkpoint.

    Attributes:
        is_copy: whether training may go on before it is written.
        wait: until the copies from the GPU are complete.
        durables: force what the states refer to, logs for one, to the disk.
    """

    files: Sequence[PendingFile]
    components: Mapping[str, ComponentRecord]
    is_copy: bool
    wait: Callable[[], object]
    durables: Sequence[Callable[[], object]]

    @property
    def length(self) -> int:
        """In bytes."""
        return sum(file.length for file in self.files)

    def write_to(self, directory: Path, advance: Advance) -> dict[str, FileRecord]:
        """Write this rank's files, durably; gives what the manifest must say of them."""
        for make_durable in self.durables:
            make_durable()
        self.wait()
        records = {}
        for file in self.files:
            filesystem.mkdir_nosync((directory / file.name).parent)
            records[file.name] = file.write_to(directory, advance)
        return records


class _States(NamedTuple):
    """What all ranks share, what is this rank's own, which of the shared must be the same on every rank; and tensors
    that are spread over them."""

    shared: dict[str, Encoded]
    own: dict[str, Encoded]
    compared: dict[str, Encoded]
    tensors: planning.Tensors


@dataclass(frozen=True, slots=True)
class Part:
    """A file of tensors that this rank writes: where they lie in it, and the tensors themselves."""

    name: str
    layout: FileLayout
    tensors: Sequence[torch.Tensor]

    def through(self, stream: BounceBuffers) -> PendingFile:
        return TensorFile(self.name, self.layout.length, functools.partial(stream.pieces, self.layout, self.tensors))


class Snapshotter:
    """Where state is captured. It keeps its memory, and the plan of who writes what, from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Buffer] = {}
        self._stream = BounceBuffers()
        self._devices = CudaCopies()
        self._plan = Plan((), None)
        self._planned_for: object = None
        self._has_said_short = False

    def rehearse(self, sharded: Sequence[ShardedState], components: Sequence[Component]) -> None:
        """Take every state and plan who would write it: all in which a save can be refused. Collective.

        Raises:
            CannotSave: on every rank, if a state on any holds what cannot be saved.
        """
        states, failure = _states(sharded, [each for each in components if each.rehearsed], {})
        collectives.run_on_all_ranks(lambda: _reraise(failure))
        signature = planning.signature(states.tensors)
        if collectives.all_reduce_max([signature != self._planned_for], "whether to plan a save anew")[0]:
            self._replan(states.tensors, signature)

    def prepare(self, sharded: Sequence[ShardedState]) -> Iterator[None]:
        """Rehearse these, and make room for them, before the first save is due. Collective.

        Returns:
            What is left to do, a little at each turn, on another thread; it may be broken off.

        Raises:
            CannotSave: as :meth:`rehearse` does: of an optimizer, the first step has made a state that is new.
        """
        self.rehearse(sharded, ())
        if self._shortage(self._plan.files):
            return iter(())
        buffers = [self._laid_out(file.name, file.layout) for file in self._plan.files]
        return (turn for buffer in buffers for turn in buffer.prefault())

    def capture(
        self,
        sharded: Sequence[ShardedState],
        components: Sequence[Component],
        carried: Mapping[str, SavedState],
        *,
        copy: bool,
    ) -> Snapshot:
        """Take every state. Collective: one small reduction, unless something has changed since the last time.

        Args:
            sharded: model and optimizer.
            components: everything else.
            carried: on rank 0, states of an earlier checkpoint that have found no component.
            copy: so that training may go on at once. Where memory is short it may not; a warning says so, once.

        Raises:
            CannotSave: on every rank, if a state on any holds what cannot be saved.
        """
        states, failure = _states(sharded, components, carried)
        sidecars = list(_sidecar_parts(states))
        signature = planning.signature(states.tensors)
        digest = _digest(states.compared)
        shortage = self._shortage([*self._plan.files, *sidecars])
        has_failed, has_changed, is_short, highest, lowest = collectives.all_reduce_max(
            [failure is not None, signature != self._planned_for, shortage > 0, digest, -digest], "what a save captures"
        )
        if has_failed:
            collectives.run_on_all_ranks(lambda: _reraise(failure))
        if highest != -lowest:
            _warn_of_differences(states.compared)
        if has_changed:
            self._replan(states.tensors, signature)
            shortage = self._shortage([*self._plan.files, *sidecars])
            (is_short,) = collectives.all_reduce_max([shortage > 0], "room for a save in memory")
        planned = [Part(file.name, file.layout, file.tensors(states.tensors)) for file in self._plan.files]
        documents = self._documents(states)
        records = {key: each.record for key, each in (states.shared | states.own).items()}
        durables = [component.make_durable for component in components]
        if copy and is_short:
            self._say_short(shortage)
        if is_short or not copy:
            streams = [part.through(self._stream) for part in (*planned, *sidecars)]
            return Snapshot([*streams, *documents], records, is_copy=False, wait=int, durables=durables)
        self._devices.begin([each.optimizer for each in sharded if each.optimizer is not None])
        copies = [self._copied(part) for part in (*planned, *sidecars)]
        return Snapshot([*copies, *documents], records, is_copy=True, wait=self._devices.end(), durables=durables)

    def _replan(self, tensors: planning.Tensors, signature: object) -> None:
        self._planned_for = None  # a plan that fails on the way is none
        planning.check_ranks_match(tensors)
        self._plan = collectives.run_on_all_ranks(lambda: planning.plan(tensors))
        self._planned_for = signature

    def _laid_out(self, name: str, layout: FileLayout) -> Buffer:
        buffer = self._buffers.setdefault(name, Buffer())
        buffer.lay_out(layout)
        return buffer

    def _copied(self, part: Part) -> PendingFile:
        buffer = self._laid_out(part.name, part.layout)
        buffer.copy(part.tensors, self._devices)
        return TensorFile(part.name, part.layout.length, buffer.pieces)

    def _shortage(self, wanted: Iterable[FilePlan | Part]) -> int:
        """Bytes of fresh memory that copies of these files would take, if there is not as much; else 0."""
        empty = Buffer()
        fresh = sum(self._buffers.get(each.name, empty).missing(each.layout) for each in wanted)
        return 0 if has_memory_for(fresh) else fresh

    def _say_short(self, shortage: int) -> None:
        if shortage and not self._has_said_short:
            self._has_said_short = True
            logger.warning(
                "a save in the background needs %s more memory for a copy of the state, and %s are available: "
                "checkpoints are written while training waits",
                format_bytes(shortage),
                format_bytes(available_memory() or 0),
            )

    def _documents(self, states: _States) -> list[PendingFile]:
        own = InlineFile(f"{rank_sidecar(collectives.rank())}.json", sidecar_json(states.own))
        if collectives.rank() != 0:
            return [own]
        assert self._plan.index is not None, "rank 0 plans"
        return [
            own,
            InlineFile(f"{SHARED}.json", sidecar_json(states.shared)),
            InlineFile(index.FILE_NAME, self._plan.index),
        ]


def publish(finished: Manifest, directory: Path, final: Path) -> None:
    """Make ``directory``, into which all ranks have written, the checkpoint ``final``. On rank 0.

    If the disk does not confirm the name, it is taken back: what is told to have failed is not there.
    """
    for folder in sorted({(directory / name).parent for name in finished.files} - {directory}):
        filesystem.fsync_directory(folder)
    filesystem.write_durably(directory / manifest.FILE_NAME, finished.to_bytes())
    filesystem.fsync_directory(directory)
    try:
        filesystem.rename(directory, final)
    except BaseException:
        with contextlib.suppress(OSError):  # as when it has not got that name
            filesystem.rename(final, directory)
        raise


def manifest_of(
    step: int,
    captured: Snapshot,
    metrics: Mapping[str, float],
    is_best: bool,
    is_finite: bool,
    records: Sequence[Mapping[str, FileRecord]],
) -> Manifest:
    """What rank 0 writes over ``captured`` and all ranks' ``records``."""
    return Manifest(
        step=step,
        world_size=collectives.world_size(),
        torch=torch.__version__,
        dalsegno=_version(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metrics=dict(metrics),
        best=is_best,
        finite=is_finite,
        files={name: record for of_one_rank in records for name, record in of_one_rank.items()},
        components=captured.components,
    )


@functools.cache
def _version() -> str:
    return importlib.metadata.version("dalsegno")


def _states(
    sharded: Sequence[ShardedState], components: Sequence[Component], carried: Mapping[str, SavedState]
) -> tuple[_States, Exception | None]:
    """Everything's state, or as much of it as there was before something failed. No collective."""
    states = _States({}, {}, {}, {})
    try:
        _take(states, sharded, components, carried)
    except Exception as error:
        return states, error
    return states, None


def _take(
    states: _States, sharded: Sequence[ShardedState], components: Sequence[Component], carried: Mapping[str, SavedState]
) -> None:
    for each in sharded:
        its_tensors, rest = each.capture()
        states.tensors[each.key] = its_tensors
        record = ComponentRecord(each.class_name, 1, "sharded")
        states.shared[each.key] = states.compared[each.key] = Encoded.of(each.key, SavedState(record, [rest]))
    for component in components:
        record = ComponentRecord(component.class_name, component.version, component.scope)
        if component.scope == "per_rank":
            states.own[component.key] = _captured(component, record)
        elif component.compared or collectives.rank() == 0:
            states.shared[component.key] = _captured(component, record)
            if component.compared:
                states.compared[component.key] = states.shared[component.key]
    taken = {key for component in components for key in component.keys} | states.tensors.keys()
    for key, saved in carried.items():
        if key not in taken:
            states.shared[key] = Encoded.of(key, saved)


def _captured(component: Component, record: ComponentRecord) -> Encoded:
    return Encoded.of(component.key, SavedState(record, [component.capture()]))


def _sidecar_parts(states: _States) -> Iterator[Part]:
    """The files of tensors beside the sidecars that this rank writes."""
    sidecars = {rank_sidecar(collectives.rank()): states.own}
    if collectives.rank() == 0:
        sidecars[SHARED] = states.shared
    for name, encoded in sidecars.items():
        if arrays := sidecar_arrays(encoded):
            layout = FileLayout.of([TensorChunk.entire(array, tensor) for array, tensor in arrays.items()])
            yield Part(f"{name}.safetensors", layout, list(arrays.values()))


def _digest(compared: Mapping[str, Encoded]) -> int:
    """A number, below 2**63, that two ranks share only if their states are the same, bit by bit."""
    if collectives.world_size() == 1:
        return 0
    checksum = xxhash.xxh3_64()
    for key, each in compared.items():
        checksum.update(f"{key} {each.checksum()} ".encode())
    return checksum.intdigest() >> 1


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _warn_of_differences(compared: Mapping[str, Encoded]) -> None:
    """Say which states that must be the same on all ranks are not: only rank 0's is saved."""
    checksums = collectives.gather({key: each.checksum() for key, each in compared.items()}, "states that differ")
    if collectives.rank() != 0:
        return
    for key, first in checksums[0].items():
        if odd := [number for number, theirs in enumerate(checksums) if theirs.get(key) != first]:
            logger.warning(
                "%s: its state is replicated, yet it differs from rank 0's on rank %s; rank 0's is saved. Make it the "
                'same on all ranks, or set state_scope = "per_rank"',
                key,
                ", ".join(map(str, odd)),
            )
