"""Parallel modes of a model: one file each, selected by one argument."""

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
    """Distribute ``model``, which is on ``device``, by the named mode; ``auto`` is DDP.

    ``loss_fn``, which computes the loss from the model's output, is distributed too if it has parameters to train.

    With a single rank nothing is distributed, whatever the mode: a script written for many ranks works unchanged.

    Raises:
        ConfigurationError: for a mode that needs ranks, if no launcher has set a world size; or if the mode does not
            support such a ``loss_fn``.
    """
    ways: dict[str, type[Parallel]] = {"none": Single, "auto": DataParallel, "ddp": DataParallel, "fsdp": FullySharded}
    if way in ("ddp", "fsdp"):
        require_launch(way)
    alone = collectives.world_size() == 1
    kind = Single if alone else ways[way]
    if loss_fn is None or not has_own_parameters(loss_fn, model, "none" if alone else way):
        return kind(model, device)
    return WithTrainedLoss(kind(model, device), kind(loss_fn, device))
