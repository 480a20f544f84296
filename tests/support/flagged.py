"""Trainings whose callbacks change the model and the optimizer beside their tensors, at step 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.distributed import collectives
from support.listeners import Listener
from support.resumed import stop_after
from support.small import small_trainer


class Flagged(nn.Module):
    """With all that training may change: modes, a rate of dropout, frozen parameters, a buffer that is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.growth = 1.0
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        self.calls += 1
        if self.calls % 4 == 0:
            x = -x
        if self.growth != 1:
            self.scale = self.scale * self.growth
        hidden = self.norm(self.first(x * self.scale))
        return nn.functional.mse_loss(self.last(self.dropout(hidden)), y)


class Counting(torch.optim.SGD):
    """Counts its steps beside its groups, as Lookahead and others do."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._k += 1
        if self._k % 4 == 0:
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.9)
        return super().step(closure)


def add_group(ctx: Any) -> None:
    ctx.model.first.requires_grad_(True)
    ctx.optimizer.add_param_group({"params": [*ctx.model.first.parameters()], "lr": 0.003})


def add_group_and_schedule_it(ctx: Any) -> None:
    """As for a schedule of torch's in any loop."""
    add_group(ctx)
    ctx.lr_scheduler.base_lrs.append(0.003)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a mode": lambda ctx: ctx.model.norm.eval(),
    "an attribute": lambda ctx: setattr(ctx.model.dropout, "p", 0.5),
    "another module": lambda ctx: setattr(ctx.model, "dropout", nn.Dropout(0.5)),
    "thawed": lambda ctx: ctx.model.first.requires_grad_(True),
    "frozen": lambda ctx: ctx.model.last.bias.requires_grad_(False),
    "an unsaved buffer": lambda ctx: setattr(ctx.model, "growth", 1.25),
    "a counting optimizer": lambda ctx: None,
    "a group": add_group,
    "a group, constant": add_group,
    "a group, scheduled": add_group_and_schedule_it,
}
BEGINS_FROZEN = ("thawed", "a group", "a group, constant", "a group, scheduled")


def at_step(step: int, change: Callable[[Any], object]) -> ds.Callback:
    def handle(ctx: Any) -> None:
        if ctx.step == step:
            change(ctx)

    return Listener({"on_step_end": handle}, name="Changes")


def flagged(output_dir: Path, *callbacks: Any, what: str = "a mode", **settings: Any) -> ds.Trainer:
    """Ten steps. ``what`` changes after the third."""
    torch.manual_seed(0)
    model, parts = Flagged(), dict[str, Any]()
    if what in BEGINS_FROZEN:
        model.first.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad or what == "thawed"]
    if what == "a counting optimizer":
        parts["optimizer"] = Counting(trained, lr=0.01)
    elif what in BEGINS_FROZEN:
        parts["optimizer"] = torch.optim.AdamW(trained, lr=0.01)
    if what == "a group, scheduled":
        parts["lr_scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(parts["optimizer"], 10)
    if what == "a group, constant":
        settings["lr_scheduler_type"] = "constant"
    callbacks = (at_step(3, CHANGES[what]), *callbacks)
    given = {"max_steps": 10, "save_steps": 100, "per_device_train_batch_size": 4 // collectives.world_size()}
    return small_trainer(output_dir, *callbacks, model=model, parts=parts, length=60, **{**given, **settings})


def train(output_dir: Path, what: str, stop: int, settings: dict[str, Any]) -> list[float]:
    """In a rank: stop after that step, 0 for never. Returns this rank's sums of the parameters."""
    trainer = flagged(output_dir, *([stop_after(stop)] if stop else []), what=what, **settings)
    trainer.train()
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trainer.model.parameters()]
    return [float(each.detach().double().sum()) for each in whole]
