"""Parallel: interface between the training step and a parallel mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Parallel:
    """A distributed model. The backward pass of the last micro-batch averages gradients over the ranks."""

    module: nn.Module
    """The module to call with a batch."""
    loss_fn: nn.Module | None = None
    """Computes the loss from the output, if it is trained too."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """``model`` is on ``device``."""
        self.module = model

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a leg; exits on every path."""
        yield

    def synchronize(self, wanted: bool) -> None:
        """Set whether the next backward pass reduces gradients over the ranks (only a step's last needs to)."""

    def rebind(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer that was built before the model was distributed."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip the gradients to a total L2 norm of ``max_norm`` (0: no clipping). Returns the norm before it, 0-dim.

        The norm is the full model's: that of a sharded model is reduced over the ranks.
        """
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([_elements(parameter) for parameter in trained])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # reduces the norms of the shards
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _elements(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient; for a sparse one (``nn.Embedding(sparse=True)``), its coalesced values."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
