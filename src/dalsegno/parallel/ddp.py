"""A copy of the model on each rank, gradients averaged (DistributedDataParallel)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .base import Parallel

# torch has renamed it, and warns of the old name.
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEPS_BUFFERS: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}


class DataParallel(Parallel):
    """Every rank holds the whole model."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        devices = [device] if device.type == "cuda" else None
        # The run shares buffers at each step's end, so that they are the same in evaluations and checkpoints, too.
        self.module = DistributedDataParallel(model, device_ids=devices, **_KEEPS_BUFFERS)

    def synchronize(self, wanted: bool) -> None:
        self.module.require_backward_grad_sync = wanted  # what no_sync() sets, without a context a micro-batch
