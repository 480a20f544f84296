"""Saving in three acts: capture into memory, write out, publish. Training stands still for the first only.

Nothing is a checkpoint before the third has renamed the finished directory to its name: whoever is killed, or runs out
of disk, at any moment before leaves the older checkpoints as they were.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dalsegno import files, ranks
from dalsegno.component import Component

from . import index, manifest, storage
from .layout import StagedFile
from .manifest import ComponentRecord, FileRecord, Manifest
from .sharded import Sharded
from .sidecar import SHARED, Document, Encoded, SavedState, Staged, rank_sidecar, stage_sidecar

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class Captured:
    """All that this rank adds to a checkpoint, in memory of its own."""

    files: list[Staged]
    components: dict[str, ComponentRecord]


class Stage:
    """Where state is captured. It keeps its buffers, so that only the first save pays for fresh memory."""

    def __init__(self) -> None:
        self._files: dict[str, StagedFile] = {}

    def capture(
        self, sharded: Sequence[Sharded], components: Sequence[Component], carried: Mapping[str, SavedState]
    ) -> Captured:
        """Copy every state. Collective.

        Args:
            sharded: model and optimizer.
            components: everything else.
            carried: on rank 0, states of an earlier checkpoint that have found no component.

        Raises:
            CannotSave: on every rank, if a state on any holds what cannot be saved.
        """
        tensors: storage.Tensors = {}
        shared, own, compared = ranks.together(lambda: _encoded(sharded, components, carried, tensors))
        _warn_of_differences(compared)
        staged, tensor_index = storage.stage(tensors, self._file)
        result: list[Staged] = [*staged, *self._sidecar(rank_sidecar(ranks.rank()), own)]
        if tensor_index is not None:
            result += [*self._sidecar(SHARED, shared), Document(index.FILE_NAME, tensor_index.to_bytes())]
        return Captured(result, {key: each.record for key, each in (shared | own).items()})

    def _file(self, name: str) -> StagedFile:
        return self._files.setdefault(name, StagedFile(name))

    def _sidecar(self, name: str, encoded: Mapping[str, Encoded]) -> list[Staged]:
        return stage_sidecar(name, encoded, self._file(f"{name}.safetensors"))


def write_out(captured: Captured, directory: Path) -> dict[str, FileRecord]:
    """Write this rank's files into ``directory``, durably; gives what the manifest must say of them."""
    records = {}
    for file in captured.files:
        files.make_directory((directory / file.name).parent)
        records[file.name] = file.write_to(directory)
    return records


def publish(finished: Manifest, directory: Path, final: Path) -> None:
    """Make ``directory``, into which all ranks have written, the checkpoint ``final``. On rank 0."""
    for folder in sorted({(directory / name).parent for name in finished.files} | {directory}):
        files.fsync_directory(folder)
    files.write_durably(directory / manifest.FILE_NAME, finished.to_bytes())
    files.fsync_directory(directory)
    files.rename(directory, final)


def manifest_of(
    step: int,
    captured: Captured,
    records: Sequence[Mapping[str, FileRecord]],
    metrics: Mapping[str, float],
    is_best: bool,
) -> Manifest:
    """What rank 0 writes over ``captured`` and all ranks' ``records``."""
    return Manifest(
        step=step,
        world_size=ranks.world_size(),
        torch=torch.__version__,
        dalsegno=_version(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metrics=dict(metrics),
        best=is_best,
        files={name: record for of_one_rank in records for name, record in of_one_rank.items()},
        components=captured.components,
    )


@functools.cache
def _version() -> str:
    return importlib.metadata.version("dalsegno")


def _encoded(
    sharded: Sequence[Sharded],
    components: Sequence[Component],
    carried: Mapping[str, SavedState],
    tensors: storage.Tensors,
) -> tuple[dict[str, Encoded], dict[str, Encoded], dict[str, Encoded]]:
    """The states that all ranks share, this rank's own, and which of the shared must be the same on every rank.

    Fills ``tensors`` with what is sharded. No collective: it may fail on one rank only.
    """
    shared: dict[str, Encoded] = {}
    own: dict[str, Encoded] = {}
    compared: dict[str, Encoded] = {}
    for each in sharded:
        its_tensors, rest = each.capture()
        tensors[each.key] = its_tensors
        record = ComponentRecord(each.class_name, 1, "sharded")
        shared[each.key] = compared[each.key] = Encoded.of(each.key, SavedState(record, [rest]))
    for component in components:
        record = ComponentRecord(component.class_name, component.version, component.scope)
        if component.scope == "per_rank":
            own[component.key] = _captured(component, record)
        elif component.compared or ranks.rank() == 0:
            shared[component.key] = _captured(component, record)
            if component.compared:
                compared[component.key] = shared[component.key]
    taken = {key for component in components for key in component.keys}
    for key, saved in carried.items():
        if key not in taken:
            shared[key] = Encoded.of(key, saved)
    return shared, own, compared


def _captured(component: Component, record: ComponentRecord) -> Encoded:
    return Encoded.of(component.key, SavedState(record, [component.capture()]))


def _warn_of_differences(compared: Mapping[str, Encoded]) -> None:
    """Say which states that must be the same on all ranks are not: only rank 0's is saved."""
    if ranks.world_size() == 1:
        return
    checksums = ranks.gather({key: each.checksum() for key, each in compared.items()})
    if ranks.rank() != 0:
        return
    for key, first in checksums[0].items():
        if odd := [number for number, theirs in enumerate(checksums) if theirs.get(key) != first]:
            logger.warning(
                "%s: its state is replicated, yet it differs from rank 0's on rank %s; rank 0's is saved. Make it the "
                'same on all ranks, or set state_scope = "per_rank"',
                key,
                ", ".join(map(str, odd)),
            )
