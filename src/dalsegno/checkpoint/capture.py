"""The states of all components on this rank: captured, encoded, and compared with the other ranks'.

Of frozen parameters that the run's script rebuilds (``save_frozen="never"``), only checksums are saved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from dalsegno.checkpoint import plan
from dalsegno.checkpoint.contract import Capturable, TensorsByComponent
from dalsegno.checkpoint.dtensors import local_part
from dalsegno.checkpoint.frozen_checksums import checksum_of
from dalsegno.checkpoint.manifest import ComponentRecord
from dalsegno.checkpoint.plan import FrozenNames
from dalsegno.checkpoint.sidecar import Encoded, SavedState
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.checkpoint.unchanged_files import live_digest
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.stateful.component import Component, varying_fields

logger = logging.getLogger("dalsegno")

Checksums = Mapping[str, Mapping[str, str]]
"""Of this rank's part of each tensor, by component and name."""


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
        _encode_into(states, sharded, components, carried)
        return (states if base is None else states._replace(base=base.unchanged(states.tensors, states.frozen))), None
    except Exception as error:
        return states, error


def _encode_into(
    states: States, sharded: Sequence[Capturable], components: Sequence[Component], carried: Mapping[str, SavedState]
) -> None:
    for each in sharded:
        states.tensors[each.key], rest, states.frozen[each.key] = each.capture()
        record = ComponentRecord(each.class_name, 1, "sharded", varying_fields(each))
        states.shared[each.key] = states.compared[each.key] = Encoded.of(each.key, SavedState(record, [rest]))
    for component in components:
        record = ComponentRecord(component.class_name, component.version, component.scope, component.varies)
        if record.scope == "per_rank":
            states.own[component.key] = _encoded(component, record)
        elif (is_compared := component.compared) or collectives.rank() == 0:
            states.shared[component.key] = _encoded(component, record)
            if is_compared:
                states.compared[component.key] = states.shared[component.key]
    taken = {key for component in components for key in component.keys} | states.tensors.keys()
    for key, saved in carried.items():
        if key not in taken:
            states.shared[key] = Encoded.of(key, saved)


def _encoded(component: Component, record: ComponentRecord) -> Encoded:
    return Encoded.of(component.key, SavedState(record, [component.capture()]))


def signature_of(states: States) -> object:
    """Equal for states that have the same plan."""
    return plan.signature(states.tensors, states.frozen), {key: {*its} for key, its in states.base.items()}


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


class FrozenChecksums:
    """Checksums of the frozen parameters as they are when this is built: before a checkpoint is loaded."""

    def __init__(self, sharded: Sequence[Capturable]) -> None:
        captured = {each.key: each.capture() for each in sharded}
        self._checksums: Checksums = {key: _checksums(each.tensors, each.frozen) for key, each in captured.items()}
        self._unchanged: dict[str, tuple[bytes, dict[str, str]]] = {}  # by component, with the digest at that time

    def unchanged(self, tensors: TensorsByComponent, frozen: FrozenNames) -> Checksums:
        """Checksums of the frozen parameters whose part on this rank has not changed since."""
        return {component: self._unchanged_of(component, its, frozen[component]) for component, its in tensors.items()}

    def _unchanged_of(
        self, component: str, tensors: Mapping[str, torch.Tensor], frozen: Collection[str]
    ) -> dict[str, str]:
        digest = _digest(tensors, frozen)
        known, unchanged = self._unchanged.get(component, (b"", {}))
        if digest != known:
            unchanged = dict(_checksums(tensors, frozen).items() & self._checksums.get(component, {}).items())
            self._unchanged[component] = digest, unchanged
        return unchanged


def unchanged_everywhere(checksums: Checksums) -> dict[str, set[str]]:
    """By component, the names that all ranks have in ``checksums``. Collective."""
    of_ranks = collectives.gather({key: {*its} for key, its in checksums.items()}, "what is not saved")
    return {key: set.intersection(*(each[key] for each in of_ranks)) for key in checksums}


def _checksums(tensors: Mapping[str, torch.Tensor], frozen: Collection[str]) -> dict[str, str]:
    return {name: _checksum(tensors[name]) for name in sorted(frozen)}


def _digest(tensors: Mapping[str, torch.Tensor], frozen: Collection[str]) -> bytes:
    with torch.no_grad():
        parts = {name: local_part(tensors[name]) for name in sorted(frozen) if not is_on_other_stage(tensors[name])}
    layout = FileLayout.of([TensorChunk.entire(name, part) for name, part in parts.items()])
    return live_digest(layout, [*parts.values()])


def _checksum(tensor: torch.Tensor) -> str:
    return "" if is_on_other_stage(tensor) else checksum_of(local_part(tensor))
