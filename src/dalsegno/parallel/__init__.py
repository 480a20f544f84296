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
from .torchrun import require_launch

__all__ = ["DataParallel", "FullySharded", "InBackward", "Parallel", "Single", "spread"]


def spread(model: nn.Module, way: str, device: torch.device) -> Parallel:
    """Spread ``model``, which lies on ``device``, in the way of that name; ``auto`` is DDP.

    Over a single rank nothing is spread, whatever the way: a script that was written for many works there as it is.

    Raises:
        ConfigurationError: for a way that needs ranks, if nobody has said that there are any.
    """
    ways: dict[str, type[Parallel]] = {"none": Single, "auto": DataParallel, "ddp": DataParallel, "fsdp": FullySharded}
    if way in ("ddp", "fsdp"):
        require_launch(way)
    return (ways[way] if ranks.world_size() > 1 else Single)(model, device)
