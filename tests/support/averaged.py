"""Runs with an average of their weights. At the top of a module, so that ranks can import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import sentences
from dalsegno.callbacks import EMA, JsonLogger
from dalsegno.distributed import collectives
from support.small import small_trainer

DECAY = 0.8


def averaged(
    output_dir: Path,
    *callbacks: ds.Callback,
    layout: str = "none",
    model: nn.Module | None = None,
    how: dict[str, Any] | None = None,
    **settings: Any,
) -> ds.Trainer:
    """Four samples a step, an evaluation every three steps, a checkpoint every four; ``how`` is EMA's."""
    torch.manual_seed(0)
    return small_trainer(
        output_dir,
        JsonLogger(),
        EMA(**{"decay": DECAY, **(how or {})}),
        *callbacks,
        model=model or Uneven(),
        parts={"train_dataset": sentences(), "eval_dataset": sentences(8, seed=1)},
        **{
            "parallel": layout,
            "per_device_train_batch_size": 4 // collectives.world_size(),
            "per_device_eval_batch_size": 2,
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "max_steps": 8,
            "eval_steps": 3,
            "save_steps": 4,
            **settings,
        },
    )


class SquaredGradients(ds.Callback):
    """As in docs/guides/callbacks.md: adds up the squares of all gradients."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def on_train_begin(self, ctx: Any) -> None:
        self.sharded_state(ctx.model)

    def on_gradients_ready(self, ctx: Any) -> None:
        for name, parameter in ctx.model.named_parameters():
            if parameter.grad is not None:
                self.sums[name] += parameter.grad.square()

    def sharded_state(self, model: nn.Module) -> Any:
        for name, parameter in model.named_parameters():
            self.sums.setdefault(name, torch.zeros_like(parameter, requires_grad=False))
        return self.sums, {}

    def load_sharded_state(self, names: Any, rest: Any) -> None: ...


def with_squares(output_dir: Path) -> ds.Trainer:
    return averaged(output_dir, SquaredGradients(), layout="fsdp")


def train(output_dir: Path, layout: str, settings: dict[str, Any]) -> None:
    averaged(output_dir, layout=layout, **settings).train()


def in_shards(output_dir: Path) -> ds.Trainer:
    return averaged(output_dir, layout="fsdp")


def shares(output_dir: Path) -> dict[str, tuple[int, int]]:
    """Of each average on this rank: its elements here, and on all ranks."""
    trainer = averaged(output_dir, layout="fsdp", max_steps=1)
    trainer.train()
    ema = next(each for each in trainer.callbacks if isinstance(each, EMA))
    tensors, _ = ema.sharded_state(trainer.model)
    return {name: (each.to_local().numel(), each.numel()) for name, each in tensors.items()}  # type: ignore[attr-defined]
