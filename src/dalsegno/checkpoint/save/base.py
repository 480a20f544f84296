"""The base of a run: its frozen parameters as the model was built, which ``save_frozen="never"`` does not save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from dalsegno.checkpoint.format.fingerprints import checksum_of
from dalsegno.checkpoint.state.contract import Capturable, TensorsByComponent
from dalsegno.checkpoint.state.sharding import local_part
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import is_elsewhere

from .planning import FrozenNames

Checksums = Mapping[str, Mapping[str, str]]
"""Of this rank's part of each tensor, by component and name."""


class FrozenBase:
    """Checksums of the frozen parameters as they are when this is built: before a checkpoint is loaded."""

    def __init__(self, sharded: Sequence[Capturable]) -> None:
        captured = {each.key: each.capture() for each in sharded}
        self._checksums: Checksums = {key: _checksums(each.tensors, each.frozen) for key, each in captured.items()}

    def unchanged(self, tensors: TensorsByComponent, frozen: FrozenNames) -> Checksums:
        """Checksums of the frozen parameters whose part on this rank still has the values of then."""
        return {
            component: dict(_checksums(its, frozen[component]).items() & self._checksums.get(component, {}).items())
            for component, its in tensors.items()
        }


def unchanged_everywhere(checksums: Checksums) -> dict[str, set[str]]:
    """By component, the names that all ranks have in ``checksums``. Collective."""
    of_ranks = collectives.gather({key: {*its} for key, its in checksums.items()}, "what is not saved")
    return {key: set.intersection(*(each[key] for each in of_ranks)) for key in checksums}


def _checksums(tensors: Mapping[str, torch.Tensor], frozen: Collection[str]) -> dict[str, str]:
    return {name: _checksum(tensors[name]) for name in sorted(frozen)}


def _checksum(tensor: torch.Tensor) -> str:
    return "" if is_elsewhere(tensor) else checksum_of(local_part(tensor))
