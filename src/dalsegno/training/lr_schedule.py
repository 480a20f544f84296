"""Learning rate schedules: those passed by the user, or the one that TrainingArguments describe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dalsegno.args import TrainingArguments
from dalsegno.data import ResumableLoader
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import EvaluateContext


def build_schedulers(given: Any, optimizer: Optimizer, args: TrainingArguments, loader: ResumableLoader) -> list[Any]:
    """The learning rate schedules that the user passes, one or several; None: the one from ``args``.

    Raises:
        ConfigurationError: if one is built on another optimizer, or the one from ``args`` cannot be built.
    """
    if given is None:
        if any(group["lr"] is None for group in optimizer.param_groups):
            raise ConfigurationError(
                f"optimizer: the learning rate of {type(optimizer).__name__} is None, since it makes its own, so there "
                "is nothing that a schedule could change; give an lr_scheduler= that only reports it, as transformers' "
                "AdafactorSchedule(optimizer), or build the optimizer with a learning rate"
            )
        return [scheduler_from_args(optimizer, args, partial(planned_steps, args, loader))]
    schedulers = list(given) if isinstance(given, (list, tuple)) else [given]
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError("lr_scheduler: it is built on another optimizer than the one that is given")
    return schedulers


def scheduler_from_args(optimizer: Optimizer, args: TrainingArguments, max_steps: Callable[[], int]) -> LambdaLR:
    """A linear rise over the warm-up, then ``lr_scheduler_type`` down to ``min_lr`` at ``max_steps()``, or constant.

    ``max_steps`` is called each time: it may be raised between two calls of ``train()``.

    Raises:
        ConfigurationError: if the schedule needs the last step, which is unknown, since the data has no length.
    """
    if max_steps() < 0 and (args.lr_scheduler_type != "constant" or args.warmup_ratio):
        needs = f"lr_scheduler_type={args.lr_scheduler_type!r}" if not args.warmup_ratio else "warmup_ratio"
        raise ConfigurationError(
            f"{needs} needs the last step, and the data has no length; set max_steps, or 'constant' with warmup_steps"
        )
    lowest = args.min_lr / args.learning_rate if args.learning_rate else 0.0

    def factor(step: int) -> float:
        last = max_steps()
        warmup = args.warmup_steps or math.ceil(args.warmup_ratio * last)
        if step < warmup:
            return step / warmup
        if args.lr_scheduler_type == "constant":
            return 1.0
        begin = warmup if args.lr_scheduler_type != "wsd" else max(warmup, last - math.ceil(args.decay_ratio * last))
        left = min(1.0, max(0.0, (last - step) / max(1, last - begin)))
        if args.lr_scheduler_type == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return lowest + (1 - lowest) * left

    return LambdaLR(optimizer, factor)


def planned_steps(args: TrainingArguments, loader: ResumableLoader) -> int:
    """Steps of the whole run; -1 if ``max_steps`` is not set and the length of the data is unknown."""
    if args.max_steps > 0:
        return args.max_steps
    microbatches = loader.microbatches_per_epoch()
    if microbatches is None:
        return -1
    accumulation, epochs, step = args.accumulation, 0, 0
    while step < accumulation.last_change and epochs + 1 <= args.num_train_epochs:
        step += accumulation.steps_to_consume(microbatches, step)
        epochs += 1
    if step < accumulation.last_change:
        left = math.ceil(args.num_train_epochs * microbatches) - epochs * microbatches
        return step + accumulation.steps_to_consume(left, step)
    each = accumulation.steps_to_consume(microbatches, step)  # of all later epochs
    return step + math.ceil(args.num_train_epochs * each) - epochs * each


class PlateauStep(Callback):
    """Steps each ``ReduceLROnPlateau`` among the schedulers with ``metric``, after every evaluation that has it."""

    def __init__(self, schedulers: Sequence[Any], metric: str) -> None:
        self._schedulers = [each for each in schedulers if isinstance(each, ReduceLROnPlateau)]
        self._metric = metric

    @staticmethod
    def is_needed(schedulers: Sequence[Any]) -> bool:
        """Whether one of them is a ``ReduceLROnPlateau``."""
        return any(isinstance(each, ReduceLROnPlateau) for each in schedulers)

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        if self._metric in ctx.metrics:
            for scheduler in self._schedulers:
                scheduler.step(ctx.metrics[self._metric])
