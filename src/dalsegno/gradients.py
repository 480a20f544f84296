"""GradientNorms: how large every gradient is, as the optimizer takes it.

Seen in the optimizer's own step, through torch's hook for it. So it does not matter when that comes: once when all
gradients are there, or for each parameter in the backward pass, where no gradient outlives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .pieces import Readings, local_gradient, named_parameters, shard_groups, squared_norms, summed


class GradientNorms:
    """The L2 norm (fp32) of each gradient, clipped and unscaled; of whole ones, however the model is spread.

    Args:
        model: for the names of its parameters; a tied one is there once.
        optimizer: whose steps are watched, until :meth:`close`.
        wanted: asked at each of them; steps that nobody wants to know of cost nothing.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, wanted: Callable[[], bool]) -> None:
        trained = [(name, each) for name, each in named_parameters(model) if each.requires_grad]
        self._names = [name for name, _ in trained]
        self._groups = [shard_groups(parameter) for _, parameter in trained]
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(trained)}
        self._device = trained[0][1].device if trained else torch.device("cpu")
        self._wanted = wanted
        self._seen: list[tuple[list[int], Tensor]] = []  # numbers, and the squares of these gradients' norms
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def look_at(self, optimizer: Optimizer) -> None:
        """Measure the gradients that the optimizer is about to take. No wait, and no collective."""
        taken = [
            (self._numbers[id(parameter)], local_gradient(parameter, gradient))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None and id(parameter) in self._numbers
        ]
        if taken:
            self._seen.append(([number for number, _ in taken], squared_norms([gradient for _, gradient in taken])))

    def take(self) -> Readings:
        """Of the gradients that have been seen since the last time. A collective where tensors are sharded."""
        seen, self._seen = self._seen, []
        count = len(self._names)
        numbers = [number for some, _ in seen for number in some]
        if count and numbers == list(range(count)):
            squares = torch.cat([some.to(self._device) for _, some in seen])
            return Readings(self._names, summed(squares, self._groups).sqrt().float())
        squares = torch.zeros(count, dtype=torch.float64, device=self._device)
        for some, values in seen:
            squares[torch.tensor(some, device=self._device)] = values.to(self._device)
        there = sorted(set(numbers))
        norms = summed(squares, self._groups).sqrt().float()[torch.tensor(there, device=self._device, dtype=torch.long)]
        return Readings([self._names[number] for number in there], norms)

    def forget(self) -> None:
        """What has been seen since the last time."""
        self._seen.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._wanted():
            self.look_at(optimizer)
