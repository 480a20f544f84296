"""How a model is spread over the ranks: each way is a file, chosen by one argument."""

from __future__ import annotations

import torch
from torch import nn

from dalsegno import ranks

from .base import Parallel
from .ddp import DataParallel
from .fsdp import FullySharded
from .in_backward import InBackward
from .single import Single

__all__ = ["DataParallel", "FullySharded", "InBackward", "Parallel", "Single", "spread"]


def spread(model: nn.Module, way: str, device: torch.device) -> Parallel:
    """Spread ``model``, which lies on ``device``, in the way of that name; ``auto`` is DDP among ranks, else none."""
    if way == "auto":
        way = "ddp" if ranks.world_size() > 1 else "none"
    ways: dict[str, type[Parallel]] = {"none": Single, "ddp": DataParallel, "fsdp": FullySharded}
    return ways[way](model, device)
