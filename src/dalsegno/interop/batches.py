"""Batches of other libraries' loaders, whose form is the user's."""

from __future__ import annotations

from typing import Any

import torch


def samples_in(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor, else 1."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((len(each) for each in leaves if isinstance(each, torch.Tensor) and each.dim()), 1)


def global_batch_size(loader: Any, world_size: int) -> int:
    """Samples of a batch on all ranks; 0 if the loader has no ``batch_size``."""
    return (getattr(loader, "batch_size", None) or 0) * world_size
