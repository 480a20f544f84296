"""The model in evaluation mode for a while, and afterwards as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each part is in the mode it was in, and sharded ones in shards."""
    modes = [(part, part.training) for part in model.modules()]  # a frozen part may stay in evaluation mode
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
            if isinstance(part, FSDPModule):
                part.reshard()  # without a backward pass FSDP2 leaves the root whole
