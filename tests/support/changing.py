"""A run whose ranks change. At the top of a module, so that ranks can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dalsegno.checkpoint.compatibility import Change
from dalsegno.distributed import collectives
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer


def train_on_ranks(output_dir: Path, batch_size: int, max_steps: int) -> list[Change]:
    """What has changed since the leg before, in the eyes of this rank."""
    changes: list[Change] = []

    def note(ctx: Any) -> None:
        changes.extend(ctx.report.changes)

    small_trainer(
        output_dir,
        Listener({"on_load": note}),
        model=Line(),
        per_device_train_batch_size=batch_size,
        max_steps=max_steps,
        save_steps=2,
        lr_scheduler_type="constant",
        parallel="ddp" if collectives.world_size() > 1 else "none",
    ).train()
    return changes


def count_threads(output_dir: Path, threads: int, max_steps: int) -> list[Change]:
    """The same with another number of threads."""
    torch.set_num_threads(threads)
    return train_on_ranks(output_dir, 4, max_steps)


def plan_of_unequal_loaders(output_dir: Path, accumulated: int, last: int) -> tuple[int, int]:
    """A leg of two epochs of which rank 0 reads 10 batches each, rank 1 fewer: steps that are done, and planned."""
    samples = tiny_regression_data(20 - 4 * collectives.rank())
    trainer = small_trainer(
        output_dir,
        Listener({"on_step_end": lambda ctx: ctx.control.stop("for now") if ctx.step == last else None}),
        model=Line(),
        parts={"train_dataset": None, "train_dataloader": DataLoader(samples, batch_size=2)},
        gradient_accumulation_steps=accumulated,
        num_train_epochs=2,
        save_steps=50,
        parallel="ddp",
    )
    return trainer.train().global_step, trainer.state.max_steps


class Casting(Line):
    """Computes in the element type of its weights."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return super().forward(x.to(self.layer.weight.dtype), y.to(self.layer.weight.dtype))


def train_in_type(
    output_dir: Path, dtype: torch.dtype, max_steps: int, allow: tuple[str, ...]
) -> dict[str, tuple[torch.dtype, float]]:
    """A leg with weights of that element type; type and mean of each state of a parameter's optimizer when it ends."""
    states: dict[str, tuple[torch.dtype, float]] = {}

    def look(ctx: Any) -> None:
        state = ctx.optimizer.state[ctx.model.layer.weight]
        states.update({kind: (value.dtype, float(value.float().mean())) for kind, value in state.items()})

    small_trainer(
        output_dir,
        Listener({"on_train_end": look}),
        model=Casting().to(dtype),
        max_steps=max_steps,
        save_steps=2,
        lr_scheduler_type="constant",
        parallel="fsdp" if collectives.world_size() > 1 else "none",
        per_device_train_batch_size=4 // collectives.world_size(),
    ).train(allow_changes=allow)
    return states
