"""State of optimizers, schedules, and what changes gradients and weights beside them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalsegno.testing import TinyRegression
from dalsegno.testing.equivalence import Trains

from .parts import calling, shrinking, trainer
from .scenario import OPTIMIZER, scenario


class Lookahead(torch.optim.SGD):
    """Keeps slow weights, and its count of steps, in attributes beside its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
        return result


@scenario(OPTIMIZER)
def lookahead(output_dir: Path) -> Trains:
    """The optimizer keeps slow weights in an attribute, which its `state_dict` does not contain."""
    model = TinyRegression()
    return trainer(output_dir, model=model, optimizer=Lookahead(model.parameters()))


@scenario(OPTIMIZER)
def schedule_with_a_counter(output_dir: Path) -> Trains:
    """The schedule is a `LambdaLR` whose function counts its calls."""
    model = TinyRegression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    calls = itertools.count(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / next(calls))
    return trainer(output_dir, model=model, optimizer=optimizer, lr_scheduler=schedule)


@scenario(OPTIMIZER)
def learning_rate_by_hand(output_dir: Path) -> Trains:
    """A callback sets the learning rate before each step, from a global counter."""
    model = TinyRegression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def set_rate(ctx: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * shrinking()

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return trainer(output_dir, calling(on_step_begin=set_rate), model=model, optimizer=optimizer, lr_scheduler=constant)


@scenario(OPTIMIZER)
def gradient_noise(output_dir: Path) -> Trains:
    """A callback adds noise to the gradients, from a generator of its own."""
    generator = torch.Generator().manual_seed(4)

    def add(ctx: Any) -> None:
        for parameter in ctx.model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)

    return trainer(output_dir, calling(on_pre_optimizer_step=add))


@scenario(OPTIMIZER)
def average_kept_outside(output_dir: Path) -> Trains:
    """A callback keeps an average of the weights in a variable, and pulls the weights to it at each fourth step."""
    average: dict[str, Tensor] = {}

    def pull(ctx: Any) -> None:
        for name, each in ctx.model.named_parameters():
            mean = average.setdefault(name, each.detach().clone())
            mean.lerp_(each.detach(), 0.1)
            if ctx.state.global_step % 4 == 0:
                each.data.lerp_(mean, 0.5)

    return trainer(output_dir, calling(on_step_end=pull))
