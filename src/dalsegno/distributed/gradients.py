"""GradientNorms: the norm of every gradient as the optimizer uses it.

Measured in the optimizer's own step, by torch's step hook. So it works both when all gradients are complete before one
step, and when each parameter is updated in the backward pass and its gradient is freed at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.errors import ConfigurationError

from . import accelerator
from .sharded_tensors import (
    DeviceScalars,
    device_of,
    local_gradients,
    named_parameters,
    shard_groups,
    squared_norms,
    summed,
)
from .stage_places import place_of


class GradientNorms:
    """The L2 norm (fp32) of each full gradient, clipped and unscaled, in any parallel mode; a tied one once.

    It is measured in those steps of ``optimizer`` for which ``wanted`` returns True, until :meth:`close`; other steps
    cost nothing. ``measures`` tells of which parameters, by their names; None: of all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        wanted: Callable[[], bool],
        measures: Callable[[str], object] | None = None,
    ) -> None:
        trained = [(name, each) for name, each in named_parameters(model) if each.requires_grad]
        self._measured: set[int] | None = None  # ids of parameters; None: all parameters of the optimizer
        if measures is not None:
            chosen = [(name, each) for name, each in trained if measures(name)]
            if trained and not chosen:
                number, first = len(trained), trained[0][0]
                raise ConfigurationError(
                    f"none of the names of the {number} trainable parameters matches; the first is {first!r}"
                )
            trained, self._measured = chosen, {id(each) for _, each in chosen}
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._groups = [shard_groups(parameter) for parameter in self._parameters]
        self._places = [place_of(parameter) for parameter in self._parameters]
        self._device = device_of(model)
        self._wanted = wanted
        self._seen: list[tuple[list[nn.Parameter], Tensor]] = []  # parameters and squared norms of their gradients
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def measure(self, optimizer: Optimizer) -> None:
        """Measure the gradients that the optimizer is about to use. No device sync, no collective."""
        taken = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if self._measured is not None:
            taken = [each for each in taken if id(each) in self._measured]
        if any(self._places):
            taken = [each for each in taken if (place := place_of(each)) is None or place.counts]
        if taken:
            self._seen.append((taken, squared_norms(local_gradients(taken, [each.grad for each in taken]))))

    def take(self) -> DeviceScalars:
        """Return the norms measured since the last call. A collective if tensors are sharded."""
        seen, self._seen = self._seen, []
        taken = [parameter for some, _ in seen for parameter in some]
        if taken and len(taken) == len(self._parameters) and all(map(operator.is_, taken, self._parameters)):
            squares = torch.cat([values.to(self._device) for _, values in seen])
            return DeviceScalars(self._names, summed(squares, self._groups).sqrt().float())
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        wide = accelerator.wide_dtype(self._device)
        squares = torch.zeros(len(numbers) + 1, dtype=wide, device=self._device)  # last: unknown parameters
        for some, values in seen:
            places = [numbers.get(id(parameter), -1) for parameter in some]
            squares[torch.tensor(places, device=self._device)] = values.to(self._device)
        there = sorted({numbers[id(parameter)] for parameter in taken if id(parameter) in numbers})
        if any(self._places):  # which gradients exist on other stages is unknown here: each is listed, as zero if none
            there = list(range(len(numbers)))
        norms = summed(squares[:-1], self._groups).sqrt().float()
        chosen = norms[torch.tensor(there, device=self._device, dtype=torch.long)]
        return DeviceScalars([self._names[number] for number in there], chosen)

    def forget(self) -> None:
        """Discard what was measured since the last :meth:`take`."""
        self._seen.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._wanted():
            self.measure(optimizer)
