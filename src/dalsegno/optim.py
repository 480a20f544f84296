"""The optimizer and the learning rate schedule that TrainingArguments describe, for whoever brings none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from .args import TrainingArguments
from .callback import Callback
from .contexts import EvaluateContext
from .errors import ConfigurationError


def default_optimizer(model: nn.Module, args: TrainingArguments) -> Optimizer:
    """AdamW on everything that is trained; matrices decay, vectors (norms, biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def default_scheduler(optimizer: Optimizer, args: TrainingArguments, max_steps: Callable[[], int]) -> LambdaLR:
    """A linear rise over ``warmup_steps``, then ``lr_scheduler_type`` down to zero at ``max_steps()``, or constant.

    ``max_steps`` is asked each time: it may be raised between two calls of ``train()``.

    Raises:
        ConfigurationError: if it shall come down, but nobody knows when: the length of the data is unknown.
    """
    if args.lr_scheduler_type != "constant" and max_steps() < 0:
        raise ConfigurationError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} needs to know the last step, and the data has no length; "
            "set max_steps, or use 'constant'"
        )

    def factor(step: int) -> float:
        if step < args.warmup_steps:
            return step / args.warmup_steps
        if args.lr_scheduler_type == "constant":
            return 1.0
        last = max_steps()
        left = max(0.0, (last - step) / max(1, last - args.warmup_steps))
        return left if args.lr_scheduler_type == "linear" else 0.5 * (1 - math.cos(math.pi * left))

    return LambdaLR(optimizer, factor)


class PlateauStep(Callback):
    """Steps each ``ReduceLROnPlateau`` with the metric of every evaluation that has it."""

    def __init__(self, schedulers: Sequence[ReduceLROnPlateau], metric: str) -> None:
        self._schedulers = schedulers
        self._metric = metric

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        if self._metric in ctx.metrics:
            for scheduler in self._schedulers:
                scheduler.step(ctx.metrics[self._metric])
