"""The same run with the optimizer after the backward pass, and fused into it. At the top of a module, for ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import sentences
from dalsegno.callbacks import GradNormLogger, JsonLogger
from dalsegno.distributed import collectives
from support.small import small_trainer

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer] | None] = {
    "default": None,
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": lambda model: AdamW(
        [{"params": [each], "lr": 0.01 * (number + 1)} for number, each in enumerate(model.parameters())], amsgrad=True
    ),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.05),
}


class Sometimes(Uneven):
    """A part of it is only used by every other batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss + self.blocks[1].weight.square().sum() * float(tokens[0, 0] % 2)


def build(
    output_dir: Path,
    fused: bool = True,
    *own: ds.Callback,
    optimizer: str = "default",
    layout: str = "none",
    model: nn.Module | None = None,
    **settings: Any,
) -> ds.Trainer:
    torch.manual_seed(0)
    model = model or Uneven()
    make = OPTIMIZERS[optimizer]
    given = {"train_dataset": sentences(), "eval_dataset": sentences(4, seed=1)}
    return small_trainer(
        output_dir,
        JsonLogger(),
        GradNormLogger(),
        *own,
        model=model,
        parts=given | ({} if make is None else {"optimizer": make(model)}),
        **{
            "fuse_optim_with_backward": fused,
            "max_grad_norm": 0,
            "parallel": layout,
            "per_device_train_batch_size": 4 // collectives.world_size(),
            "max_steps": 8,
            "warmup_steps": 2,
            "learning_rate": 0.05,
            "weight_decay": 0.1,
            "logging_steps": 2,
            "eval_steps": 4,
            "save_steps": 4,
            **settings,
        },
    )


def train(output_dir: Path, fused: bool, layout: str, settings: dict[str, Any]) -> None:
    build(output_dir, fused, layout=layout, **settings).train()


def on_two_ranks(output_dir: Path) -> ds.Trainer:
    return build(output_dir, layout="fsdp", gradient_accumulation_steps=2)
