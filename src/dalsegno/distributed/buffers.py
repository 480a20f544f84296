"""SharedBuffers: keeps a model's buffers, such as running statistics, equal on all ranks.

Each rank updates its buffers from its own batches. As in DistributedDataParallel, rank 0's are used: they are broadcast
at the end of each step. So an evaluation does not depend on which rank sees which sample, a checkpoint contains what
every rank has, and saving changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import collectives
from .sharded_tensors import unexpanded
from .stage_places import place_of


class SharedBuffers:
    """The persistent buffers of ``modules``, which checkpoints contain. Costs nothing for a model without any."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._places: list[tuple[nn.Module, str]] = []

    def begin_leg(self) -> None:
        """Find the buffers. If the ranks' buffers differ in name or shape, each rank keeps its own. Collective."""
        if not collectives.initialized():
            return
        self._places = [place for module in self._modules for part in module.modules() for place in _persistent(part)]
        _, are_equal = collectives.run_and_compare(
            self._found, lambda found: [(name, each.shape, each.dtype) for (_, name), each in found]
        )
        if not are_equal:
            self._places = []

    def share(self) -> None:
        """Broadcast rank 0's buffers. Collective, if there are any."""
        if not self._places:
            return
        with torch.no_grad():
            tensors = [each for _, each in self._found()]
            _share_in_stages(tensors)
            found = {id(each): unexpanded(each.detach()) for each in tensors if place_of(each) is None}
            collectives.broadcast_tensors(found.values())

    def _found(self) -> list[tuple[tuple[nn.Module, str], Tensor]]:
        """Look up the present tensors: a step may have replaced a buffer by another tensor."""
        there = [((module, name), getattr(module, name, None)) for module, name in self._places]
        return [(place, each) for place, each in there if isinstance(each, Tensor) and not isinstance(each, DTensor)]


def _share_in_stages(tensors: Iterable[Tensor]) -> None:
    """Broadcast the buffers of a pipeline stage among the ranks that run it on different data."""
    for tensor in tensors:
        place = place_of(tensor)
        if place is not None and place.copies is not None and not tensor.is_meta:
            dist.broadcast(tensor, group=place.copies, group_src=0)


def _persistent(module: nn.Module) -> list[tuple[nn.Module, str]]:
    left_out = module._non_persistent_buffers_set
    return [(module, name) for name, _ in module.named_buffers(recurse=False) if name not in left_out]
