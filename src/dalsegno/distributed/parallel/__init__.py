"""How a model is spread over the ranks: each way is a file, chosen by one argument."""

from __future__ import annotations

import torch
from torch import nn

from dalsegno.distributed import collectives

from .base import Parallel
from .ddp import DataParallel
from .fsdp import FullySharded
from .fused_backward import FusedBackward
from .single import Single
from .torchrun import require_launch
from .trained_loss import WithTrainedLoss, has_own_parameters

__all__ = ["DataParallel", "FullySharded", "FusedBackward", "Parallel", "Single", "parallelize"]


def parallelize(model: nn.Module, way: str, device: torch.device, loss_fn: nn.Module | None = None) -> Parallel:
    """Spread ``model``, which lies on ``device``, in the way of that name; ``auto`` is DDP.

    ``loss_fn``, which makes the loss of what the model returns, is spread beside it if it has parameters to train.

    Over a single rank nothing is spread, whatever the way: a script that was written for many works there as it is.

    Raises:
        ConfigurationError: for a way that needs ranks, if nobody has said that there are any; or if it does not work
            with such a ``loss_fn``.
    """
    ways: dict[str, type[Parallel]] = {"none": Single, "auto": DataParallel, "ddp": DataParallel, "fsdp": FullySharded}
    if way in ("ddp", "fsdp"):
        require_launch(way)
    alone = collectives.world_size() == 1
    kind = Single if alone else ways[way]
    if loss_fn is None or not has_own_parameters(loss_fn, model, "none" if alone else way):
        return kind(model, device)
    return WithTrainedLoss(kind(model, device), kind(loss_fn, device))
