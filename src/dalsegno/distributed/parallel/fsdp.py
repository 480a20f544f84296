"""FSDP2: parameters, gradients and optimizer state sharded over the ranks (``fully_shard``)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from dalsegno.distributed import collectives
from dalsegno.distributed.blocks import unshared_blocks
from dalsegno.distributed.sharded_tensors import once
from dalsegno.errors import ConfigurationError

from .base import Parallel


class FullySharded(Parallel):
    """Shards each block (an element of a ``ModuleList`` or ``Sequential``) as a unit, and the rest as one more. A block
    that shares a parameter with another part belongs to the rest.

    An already sharded model is used as it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._before = {id(parameter): name for name, parameter in model.named_parameters()}
        if not isinstance(model, FSDPModule):
            # each rank keeps a shard of its own copy, so the copies must be equal
            collectives.broadcast_tensors([*model.parameters(), *map(once, model.buffers())])
            mesh = init_device_mesh(device.type, (collectives.world_size(),))
            for block in unshared_blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.module = model
        self._sharded = cast(FSDPModule, model)

    def synchronize(self, wanted: bool) -> None:
        self._sharded.set_requires_gradient_sync(wanted)

    def rebind(self, optimizer: Optimizer) -> None:
        """Sharding replaces the parameter objects; substitute the new ones in the optimizer.

        Raises:
            ConfigurationError: if the optimizer has already stepped.
        """
        now = dict(self.module.named_parameters())
        known = {id(parameter) for parameter in now.values()}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in known or id(parameter) not in self._before:
                    continue
                if optimizer.state:
                    raise ConfigurationError(
                        "optimizer: it has stepped before the model was sharded; build a new one on the model that you "
                        "pass to the trainer"
                    )
                group["params"][index] = now[self._before[id(parameter)]]
