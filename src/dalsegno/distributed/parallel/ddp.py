"""DDP: a copy of the model on each rank, with averaged gradients (DistributedDataParallel)."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .base import Parallel


class DataParallel(Parallel):
    """Every rank has the full model."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        devices = [device] if device.type != "cpu" else None
        # The run broadcasts buffers at the end of each step, so that evaluations and checkpoints see them equal too.
        # Since 2.13 torch deprecates this argument, and says to keep it if the initial buffers may differ by rank:
        # forward_sync_buffers=False, its successor, overwrites them with rank 0's.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.module = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)

    def synchronize(self, wanted: bool) -> None:
        self.module.require_backward_grad_sync = wanted  # as no_sync() does, without a context per micro-batch
