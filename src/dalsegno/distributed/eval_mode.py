"""Temporary evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; on exit, restore each submodule's mode and reshard FSDP modules."""
    # Restored one by one: a frozen submodule may have been in evaluation mode before.
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
            if isinstance(part, FSDPModule):
                part.reshard()  # FSDP2 leaves the root unsharded if no backward pass follows
