"""What the update asks of a way to spread a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Parallel:
    """A model spread over the ranks. Gradients are averaged over them by the last micro-batch's backward."""

    module: nn.Module
    """What is called with a batch."""
    loss_fn: nn.Module | None = None
    """What makes the loss of it, if that is trained too."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """``model`` lies on ``device``."""
        self.module = model

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a leg, whatever becomes of it."""
        yield

    def synchronize(self, wanted: bool) -> None:
        """Whether the next backward reduces gradients over the ranks (only the last of a step needs to)."""

    def rebind(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was built on the model before it was spread train it as it is now."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip the gradients to a total L2 norm of ``max_norm`` (0: leave them); their norm before that, 0-dim.

        The norm is that of the whole model: a sharded one's is reduced over the ranks.
        """
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([_elements(parameter) for parameter in trained])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # of the shards' norms it holds only this rank's until now
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _elements(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient, or what a sparse one (``nn.Embedding(sparse=True)``) has of elements, each place once."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
