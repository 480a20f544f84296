"""WithTrainedLoss: a model and a loss function with its own parameters, trained together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from dalsegno.distributed.modes import DDP, Mode
from dalsegno.errors import ConfigurationError

from .base import Parallel


class WithTrainedLoss(Parallel):
    """Distributes both in the same mode, as separate units, so that the gradients of both are averaged."""

    def __init__(self, model: Parallel, loss_fn: Parallel) -> None:
        self.module, self.loss_fn = model.module, loss_fn.module
        self._parts = [model, loss_fn]
        if any(part.complete_gradients for part in self._parts):
            self.complete_gradients = self._complete_gradients

    @contextmanager
    def training(self) -> Iterator[None]:
        model, loss_fn = self._parts
        with model.training(), loss_fn.training():
            yield

    def synchronize(self, wanted: bool) -> None:
        for part in self._parts:
            part.synchronize(wanted)

    def _complete_gradients(self) -> None:
        for part in self._parts:
            if part.complete_gradients is not None:
                part.complete_gradients()

    def rebind(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.rebind(optimizer)


def has_own_parameters(loss_fn: nn.Module, model: nn.Module, modes: Sequence[Mode]) -> bool:
    """Whether ``loss_fn`` has trainable parameters that the model does not have. Call before distributing either.

    Raises:
        ConfigurationError: if they share a parameter whose gradient these modes could not average.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    own = [each for each in loss_fn.parameters() if id(each) not in of_model and each.requires_grad]
    shared = next((name for name, each in loss_fn.named_parameters() if id(each) in of_model), None)
    are_replaced = any(not isinstance(mode, DDP) for mode in modes)
    if shared is not None and (are_replaced or (own and modes)):
        raise ConfigurationError(
            f"loss_fn: {type(loss_fn).__name__} shares {shared} with the model, and over several ranks "
            f"(parallel={', '.join(map(str, modes))}) its gradient would be wrong; compute the loss in the "
            "model's forward"
        )
    return bool(own)
