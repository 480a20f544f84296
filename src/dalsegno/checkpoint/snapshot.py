"""Snapshots: capture the state of every component on this rank, ready to be written."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from dalsegno.checkpoint import names
from dalsegno.checkpoint import plan as planning
from dalsegno.checkpoint.contract import Capturable, TensorsByComponent
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.file_writing import (
    Advance,
    InlineFile,
    LinkableFiles,
    MappedFile,
    PendingFile,
    StagedFile,
    StreamedFile,
    UnchangedFile,
    live_digest,
)
from dalsegno.checkpoint.frozen_checksums import Checksums, Fingerprint, FrozenChecksums, to_bytes, unchanged_everywhere
from dalsegno.checkpoint.manifest import ComponentRecord, Manifest
from dalsegno.checkpoint.names import SHARED, rank_sidecar
from dalsegno.checkpoint.plan import FilePlan, Plan
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.sidecar import Encoded, SavedState, sidecar_arrays, sidecar_json
from dalsegno.checkpoint.staging import Buffer, Copying, Layouts, NoRoom, Slot
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.data.loader import NOT_EXACT
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import RankFailed
from dalsegno.stateful.component import Component, varying_fields
from dalsegno.system import filesystem
from dalsegno.system.machine import available_memory, has_memory_for
from dalsegno.system.progress import format_bytes

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This rank's part of a checkpoint.

    Attributes:
        files: files of tensors, in the order in which they are copied.
        unchanged: files that the checkpoint before has, too.
        digests: by name, of the tensors in files of frozen ones.
        small: small files; written first, while those of tensors are being copied, and flushed last: three fsyncs in a
            row take 12 ms, each after its write 18 to 24.
        copying: the copies of the tensors, after which training may continue; None if the live tensors are written.
        durables: flush to disk what the states refer to, such as logs.
        layout: which ranks read the same data.
    """

    files: Sequence[PendingFile]
    unchanged: Sequence[UnchangedFile]
    digests: Mapping[str, bytes]
    small: Sequence[InlineFile]
    components: Mapping[str, ComponentRecord]
    copying: Copying | None
    durables: Sequence[Callable[[], object]]
    layout: Layout

    @property
    def length(self) -> int:
        """Bytes to be written."""
        return sum(file.length for file in self._all_files)

    @property
    def _all_files(self) -> list[PendingFile | InlineFile]:
        """In the order of the manifest."""
        return [*self.files, *self.unchanged, *self.small]

    def write_to(self, directory: Path, advance: Advance) -> dict[str, FileRecord]:
        """Write this rank's files durably, and return their records for the manifest."""
        for make_durable in self.durables:
            make_durable()
        if self.copying is not None:
            self.copying.wait_for_devices()
        file_names = [file.name for file in self._all_files]
        for parent in dict.fromkeys((directory / name).parent for name in file_names):
            filesystem.mkdir_nosync(parent)
        with contextlib.ExitStack() as flushes:
            of_small = [flushes.enter_context(file.written_to(directory, advance)) for file in self.small]
            of_unchanged = [file.write_to(directory, advance) for file in self.unchanged]
            records = [*(file.write_to(directory, advance) for file in self.files), *of_unchanged, *of_small]
        return dict(zip(file_names, records, strict=True))

    def manifest(
        self,
        step: int,
        metrics: Mapping[str, float],
        is_best: bool,
        is_finite: bool,
        records: Sequence[Mapping[str, FileRecord]],
    ) -> Manifest:
        """Manifest of the checkpoint, for rank 0; ``records`` are those of all ranks."""
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
            components=self.components,
            data_ranks=self.layout.data_ranks if self.layout.sharing > 1 else (),
        )


class Snapshotter:
    """Captures snapshots. Keeps its buffers, and the plan of which rank writes what, between saves. ``base``: frozen
    parameters of which only checksums are saved, as long as they are as they were in it."""

    def __init__(self, layout: Layout | None = None, base: FrozenChecksums | None = None) -> None:
        self._layout = layout or Layout.flat()
        self.base = base
        self.plan = Plan((), {}, None)
        self._planned_for: object = None
        self._buffers: dict[str, Buffer] = {}
        self._has_warned_short = False

    def check_serializable(self, sharded: Sequence[Capturable], components: Sequence[Component]) -> None:
        """Encode every state and plan the files, so that all that can refuse a save does so now: raises CannotSave on
        every rank if a state on any rank cannot be saved. Collective."""

        def encoded() -> tuple[States, object]:
            states, failure = encode_all(sharded, [each for each in components if each.rehearsed], {}, self.base)
            _reraise(failure)
            return states, signature_of(states)

        (states, signature), are_alike = collectives.run_and_compare(encoded, lambda each: each[1] == self._planned_for)
        if not are_alike or signature != self._planned_for:
            self._replan(states, signature)

    def prepare(
        self, sharded: Sequence[Capturable], sizes: Collection[int] = (), slot: Slot | None = None
    ) -> Iterator[None]:
        """Plan the first save and lay out its buffers, or the ``slot`` of a memory checkpoint, before it is due, but
        for files that may be unchanged: those of ``sizes`` of the checkpoint before. Returns an iterator that prefaults
        them, about a millisecond at each turn; it may run on another thread and be interrupted. Collective."""
        self.check_serializable(sharded, ())
        files = [file for file in self.plan.files if not (file.is_frozen and file.layout.length in sizes)]
        if slot is not None:
            _make_room(slot, slot.lay_out, files)
            return slot.prefault()
        if self._memory_shortage(files):
            return iter(())
        buffers = [self._laid_out(file.name, file.layout) for file in files]
        return (turn for buffer in buffers for turn in buffer.prefault())

    def capture(
        self,
        sharded: Sequence[Capturable],
        components: Sequence[Component],
        carried: Mapping[str, SavedState],
        *,
        copy: bool,
        former: LinkableFiles | None = None,
        slot: Slot | None = None,
    ) -> Snapshot:
        """Capture every state, except for the copies of tensors, which are still to be made: see
        :attr:`Snapshot.copying`. ``carried``: on rank 0, states of an earlier checkpoint that no component claimed.
        ``copy``: so that training may continue; not where memory is short. ``former``: files of the checkpoint before;
        to find those of frozen tensors that it has too, which are not written again, the frozen tensors are hashed.
        ``slot``: whose files tensors are copied to, in place of buffers that are then written. Collective: one small
        reduction, unless something changed since the last capture. Raises NoRoom on every rank, if the slot's files do
        not fit into memory."""
        states, failure = encode_all(sharded, components, carried, self.base)
        sidecars = list(_sidecar_files(states))
        signature = signature_of(states)
        digest = digest_of(states.compared)
        is_planned = failure is None and signature == self._planned_for
        unchanged, changed, digests = self._planned(states.tensors, former, slot) if is_planned else ([], [], {})
        shortage = self._shortage(changed, sidecars, slot)
        warnings = [warning for each in components if (warning := each.take_warning()) is not None]
        has_failed, has_changed, is_short, has_warnings, highest, lowest = collectives.all_reduce_max(
            [failure is not None, not is_planned, shortage > 0, bool(warnings), digest, -digest], "what a save captures"
        )
        if has_failed:
            collectives.run_on_all_ranks(lambda: _reraise(failure))
        if has_warnings:
            of_ranks = collectives.gather(warnings, "warnings of a save")
            for warning in dict.fromkeys(itertools.chain(*of_ranks)) if collectives.rank() == 0 else ():
                logger.warning("%s", warning, extra={NOT_EXACT: True})
        if highest != -lowest:
            warn_of_differences(states.compared)
        if has_changed:
            self._replan(states, signature)
            unchanged, changed, digests = self._planned(states.tensors, former, slot)
            shortage = self._shortage(changed, sidecars, slot)
            (is_short,) = collectives.all_reduce_max([shortage > 0], "room for a save in memory")
        if slot is not None and is_short:
            _make_room(slot, slot.reserve, changed)
        is_copied = copy and (slot is not None or not is_short)
        if copy and not is_copied:
            self._warn_short(shortage)
        copying = Copying() if is_copied else None
        files: list[PendingFile] = [*changed, *sidecars]
        if copying is not None:
            files = [self._staged(file, copying, slot) for file in (*changed, *sidecars)]
        small = self._inline_files(states)
        records = {key: each.record for key, each in (states.shared | states.own).items()}
        durables = [component.make_durable for component in components]
        if slot is not None:
            durables = []  # what a process wrote outlives it without fsync
        return Snapshot(files, unchanged, digests, small, records, copying, durables, self._layout)

    def _replan(self, states: States, signature: object) -> None:
        self._planned_for = None  # stays so if planning fails
        absent = {} if self.base is None else unchanged_everywhere(states.base)
        self.plan = planning.plan_on_all_ranks(states.tensors, states.frozen, absent)
        self._planned_for = signature

    def _planned(
        self, tensors: TensorsByComponent, former: LinkableFiles | None, slot: Slot | None
    ) -> tuple[list[UnchangedFile], list[StreamedFile], dict[str, bytes]]:
        """This rank's planned files: those that ``former`` has too, whose buffers are freed, and all others. Also
        digests of those of frozen tensors."""
        unchanged, changed, digests = list[UnchangedFile](), list[StreamedFile](), dict[str, bytes]()
        for file in self.plan.files:
            content = StreamedFile(file.name, file.layout, file.tensors(tensors))
            found = None
            if file.is_frozen:
                digests[file.name] = live_digest(content.layout, content.tensors)
                if former is not None:
                    found = former.find(content.name, content.layout, content.tensors, digests[file.name])
            if found is None:
                changed.append(content)
                continue
            unchanged.append(found)
            self._buffers.pop(file.name, None)
            if slot is not None:
                slot.release(file.name)
        return unchanged, changed, digests

    def _laid_out(self, name: str, layout: FileLayout) -> Buffer:
        buffer = self._buffers.setdefault(name, Buffer())
        buffer.lay_out(layout)
        return buffer

    def _staged(self, file: StreamedFile, copying: Copying, slot: Slot | None) -> PendingFile:
        if slot is not None and file.name in slot:
            mapped = slot.buffer(file.name)
            return MappedFile(file.name, mapped, copying.add(mapped, file.tensors))
        buffer = self._laid_out(file.name, file.layout)
        return StagedFile(file.name, buffer, copying.add(buffer, file.tensors))

    def _shortage(self, changed: Sequence[StreamedFile], sidecars: Sequence[StreamedFile], slot: Slot | None) -> int:
        """As :meth:`_memory_shortage`. Of a slot, which is not asked how much it lacks: not 0 if it lacks anything."""
        if slot is not None:
            return int(not slot.are_ready(_layouts(changed)))
        return self._memory_shortage([*changed, *sidecars])

    def _memory_shortage(self, wanted: Iterable[FilePlan | StreamedFile]) -> int:
        """Bytes of fresh memory that copies of these files need if that much is not available; else 0."""
        empty = Buffer()
        fresh = sum(self._buffers.get(each.name, empty).missing(each.layout) for each in wanted)
        return 0 if has_memory_for(fresh) else fresh

    def _warn_short(self, shortage: int) -> None:
        if shortage and not self._has_warned_short:
            self._has_warned_short = True
            logger.warning(
                "an async save needs %s more memory for a copy of the state, and %s are available: "
                "checkpoints are written while training waits",
                format_bytes(shortage),
                format_bytes(available_memory() or 0),
            )

    def _inline_files(self, states: States) -> list[InlineFile]:
        rank = collectives.rank()
        own = [InlineFile(names.sidecar_states(rank_sidecar(rank)), sidecar_json(states.own))]
        for component, chunks in self.plan.absent.items():
            checksums = states.base[component]
            prints = {
                chunk.name: Fingerprint(Box(chunk.offsets, chunk.shape), checksums[chunk.name]) for chunk in chunks
            }
            own.append(InlineFile(names.fingerprints(component, rank), to_bytes(prints)))
        if rank != 0:
            return own
        assert self.plan.index is not None, "rank 0's plan has the index"
        return [
            *own,
            InlineFile(names.sidecar_states(SHARED), sidecar_json(states.shared)),
            InlineFile(names.INDEX, self.plan.index),
        ]


@functools.cache
def _version() -> str:
    """Of the installed package; of one that is only on the path, such as a clone, there is none."""
    try:
        return importlib.metadata.version("dalsegno")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _sidecar_files(states: States) -> Iterator[StreamedFile]:
    """Those of tensors that this rank writes."""
    sidecars = {rank_sidecar(collectives.rank()): states.own}
    if collectives.rank() == 0:
        sidecars[SHARED] = states.shared
    for name, encoded in sidecars.items():
        if arrays := sidecar_arrays(encoded):
            layout = FileLayout.of([TensorChunk.entire(array, tensor) for array, tensor in arrays.items()])
            yield StreamedFile(names.sidecar_tensors(name), layout, list(arrays.values()))


def _layouts(files: Iterable[FilePlan | StreamedFile]) -> Layouts:
    return {file.name: file.layout for file in files}


def _make_room(slot: Slot, make: Callable[[Layouts], None], files: Iterable[FilePlan | StreamedFile]) -> None:
    """Collective."""
    try:
        collectives.run_on_all_ranks(lambda: make(_layouts(files)))
    except BaseException as error:
        slot.clear()  # on every rank, so that all ranks lay out the files again at the next save
        if isinstance(error, (OSError, RankFailed)):
            raise NoRoom(str(error)) from error
        raise


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


# --- the states of all components on this rank ----------------------------------------------------------------------


class States(NamedTuple):
    """Captured states: shared by all ranks; of this rank only; the shared ones to compare across ranks; tensors that
    are sharded over the ranks; the names of the frozen ones among these; and checksums of those to be left out."""

    shared: dict[str, Encoded]
    own: dict[str, Encoded]
    compared: dict[str, Encoded]
    tensors: TensorsByComponent
    frozen: dict[str, Collection[str]]
    base: Checksums


def encode_all(
    sharded: Sequence[Capturable],
    components: Sequence[Component],
    carried: Mapping[str, SavedState],
    base: FrozenChecksums | None,
) -> tuple[States, Exception | None]:
    """Every state; or the states before the first one that raised, and its exception. No collective."""
    states = States({}, {}, {}, {}, {}, {})
    try:
        for each in sharded:
            states.tensors[each.key], rest, states.frozen[each.key] = each.capture()
            record = ComponentRecord(each.class_name, 1, "sharded", varying_fields(each))
            states.shared[each.key] = states.compared[each.key] = Encoded.of(each.key, SavedState(record, [rest]))
        for component in components:
            key, is_compared, is_own = component.key, component.compared, component.scope == "per_rank"
            if is_own or is_compared or collectives.rank() == 0:
                record = ComponentRecord(component.class_name, component.version, component.scope, component.varies)
                encoded = Encoded.of(key, SavedState(record, [component.capture()]))
                (states.own if is_own else states.shared)[key] = encoded
                if is_compared:
                    states.compared[key] = encoded
        taken = {key for component in components for key in component.keys} | states.tensors.keys()
        states.shared.update({key: Encoded.of(key, saved) for key, saved in carried.items() if key not in taken})
        return (states if base is None else states._replace(base=base.unchanged(states.tensors, states.frozen))), None
    except Exception as error:
        return states, error


def signature_of(states: States) -> object:
    """Equal for states that have the same plan."""
    return planning.signature(states.tensors, states.frozen), {key: {*its} for key, its in states.base.items()}


def digest_of(compared: Mapping[str, Encoded]) -> int:
    """A number below 2**63, equal on two ranks only if their states are equal bit by bit."""
    if collectives.world_size() == 1:
        return 0
    checksum = xxhash.xxh3_64()
    for key, each in compared.items():
        checksum.update(f"{key} {each.checksum()} ".encode())
    return checksum.intdigest() >> 1


def warn_of_differences(compared: Mapping[str, Encoded]) -> None:
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
