"""A model that the user has spread over a mesh: used as it is."""

from __future__ import annotations

from torch import nn

from .base import Parallel
from .fsdp import sharded_parts


class Spread(Parallel):
    """Reduces the gradients in the user's own way; with FSDP2, in a step's last backward pass only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sharded = sharded_parts(model)

    def synchronize(self, wanted: bool) -> None:
        for part in self._sharded:
            part.set_requires_gradient_sync(wanted, recurse=False)
