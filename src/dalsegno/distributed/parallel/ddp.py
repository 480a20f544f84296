"""A copy of the model on each rank, gradients averaged (DistributedDataParallel)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .base import Parallel


class DataParallel(Parallel):
    """Every rank holds the whole model."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        devices = [device] if device.type == "cuda" else None
        # The run shares buffers at each step's end, so that they are the same in evaluations and checkpoints, too.
        self.module = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)

    def synchronize(self, wanted: bool) -> None:
        self.module.require_backward_grad_sync = wanted  # what no_sync() sets, without a context a micro-batch
