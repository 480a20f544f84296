"""A loss function with parameters of its own, beside the model that it is trained with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.errors import ConfigurationError

from .base import Parallel


class WithTrainedLoss(Parallel):
    """Both are spread in the same way, each as a unit of its own, so that the gradients of both are averaged.

    Args:
        model: the model, spread.
        loss_fn: the loss function, spread.
    """

    def __init__(self, model: Parallel, loss_fn: Parallel) -> None:
        self.module, self.loss_fn = model.module, loss_fn.module
        self._parts = [model, loss_fn]

    @contextmanager
    def training(self) -> Iterator[None]:
        model, loss_fn = self._parts
        with model.training(), loss_fn.training():
            yield

    def synchronize(self, wanted: bool) -> None:
        for part in self._parts:
            part.synchronize(wanted)

    def rebind(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.rebind(optimizer)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        return self._parts[0].clip(parameters, max_norm)


def has_own_parameters(loss_fn: nn.Module, model: nn.Module, way: str) -> bool:
    """Whether there is anything to train in ``loss_fn`` that is not trained with the model. Neither is spread yet.

    Raises:
        ConfigurationError: if they share a parameter, and ``way`` cannot average its gradient then.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    own = [each for each in loss_fn.parameters() if id(each) not in of_model and each.requires_grad]
    shared = next((name for name, each in loss_fn.named_parameters() if id(each) in of_model), None)
    if shared is not None and (way == "fsdp" or (own and way != "none")):
        raise ConfigurationError(
            f"loss_fn: {type(loss_fn).__name__} shares {shared} with the model, and over several ranks "
            f"(parallel={way!r}) its gradient would not be right; let the model itself compute the loss, in its forward"
        )
    return bool(own)
