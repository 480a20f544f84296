"""The base of a run: its frozen parameters as the model was built, which ``save_frozen="never"`` does not save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from dalsegno.checkpoint.contract import Capturable, TensorsByComponent
from dalsegno.checkpoint.dtensors import local_part
from dalsegno.checkpoint.frozen_checksums import checksum_of
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import is_on_other_stage

from .live_digest import live_digest
from .planning import FrozenNames

Checksums = Mapping[str, Mapping[str, str]]
"""Of this rank's part of each tensor, by component and name."""


class FrozenBase:
    """Checksums of the frozen parameters as they are when this is built: before a checkpoint is loaded."""

    def __init__(self, sharded: Sequence[Capturable]) -> None:
        captured = {each.key: each.capture() for each in sharded}
        self._checksums: Checksums = {key: _checksums(each.tensors, each.frozen) for key, each in captured.items()}
        self._unchanged: dict[str, tuple[bytes, dict[str, str]]] = {}  # by component, with the digest at that time

    def unchanged(self, tensors: TensorsByComponent, frozen: FrozenNames) -> Checksums:
        """Checksums of the frozen parameters whose part on this rank still has the values of then."""
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
    """Of the names and of this rank's parts."""
    with torch.no_grad():
        parts = {name: local_part(tensors[name]) for name in sorted(frozen) if not is_on_other_stage(tensors[name])}
    layout = FileLayout.of([TensorChunk.entire(name, part) for name, part in parts.items()])
    return live_digest(layout, [*parts.values()])


def _checksum(tensor: torch.Tensor) -> str:
    return "" if is_on_other_stage(tensor) else checksum_of(local_part(tensor))
