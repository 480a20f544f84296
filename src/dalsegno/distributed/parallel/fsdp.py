"""Parameters, gradients and optimizer state in shards, one on each rank (FSDP2's ``fully_shard``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import once
from dalsegno.errors import ConfigurationError

from .base import Parallel


class FullySharded(Parallel):
    """Each block (an element of a ``ModuleList`` or ``Sequential``) is a unit of its own, the rest is one more; a block
    that shares a parameter with another part belongs to the rest.

    A model that is sharded already is taken as it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._before = {id(parameter): name for name, parameter in model.named_parameters()}
        if not isinstance(model, FSDPModule):
            # each rank keeps a shard of its own copy: they must be the same
            collectives.broadcast_tensors([*model.parameters(), *map(once, model.buffers())])
            mesh = init_device_mesh(device.type, (collectives.world_size(),))
            for block in _blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.module = model
        self._sharded = cast(FSDPModule, model)

    def synchronize(self, wanted: bool) -> None:
        self._sharded.set_requires_gradient_sync(wanted)

    def rebind(self, optimizer: Optimizer) -> None:
        """Sharding replaces each parameter by another object: put the new ones in the old ones' places.

        Raises:
            ConfigurationError: if the optimizer has stepped already.
        """
        now = dict(self.module.named_parameters())
        known = {id(parameter) for parameter in now.values()}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in known or id(parameter) not in self._before:
                    continue
                if optimizer.state:
                    raise ConfigurationError(
                        "optimizer: it has stepped before the model was sharded; build it anew, on the model that the "
                        "trainer is given"
                    )
                group["params"][index] = now[self._before[id(parameter)]]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model that have parameters; inner ones first, as fully_shard wants them.

    Two units would each make shards of a parameter of their own, and untie what is tied: a part that shares one with
    another is left to the unit around both.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].add(module)
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            blocks += [block for block in module if _stands_alone(block, holders)]
    return list(dict.fromkeys(reversed(blocks)))


def _stands_alone(block: nn.Module, holders: Mapping[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether it has parameters, and nothing else has any of them."""
    parameters, parts = list(block.parameters()), set(block.modules())
    return bool(parameters) and all(holders[parameter] <= parts for parameter in parameters)
