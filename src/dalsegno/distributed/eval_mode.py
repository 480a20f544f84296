"""Modules in evaluation mode for a while, and afterwards as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each part is in the mode it was in, and sharded ones in shards."""
    # A frozen part may stay in evaluation mode.
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
                part.reshard()  # without a backward pass FSDP2 leaves the root whole
