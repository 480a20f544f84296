"""Optimizer and learning rate schedules: the defaults from TrainingArguments, and hyperparameters after a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from dalsegno.args import TrainingArguments
from dalsegno.data import ResumableLoader
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import EvaluateContext
from dalsegno.stateful.schema import Must, check, check_like

from .schedule import planned_steps


def default_optimizer(modules: Iterable[nn.Module], args: TrainingArguments) -> Optimizer:
    """AdamW on all trained parameters of ``modules``, with weight decay on matrices, not on vectors (norms, biases)."""
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
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


def build_schedulers(given: Any, optimizer: Optimizer, args: TrainingArguments, loader: ResumableLoader) -> list[Any]:
    """The learning rate schedules that the user passes, one or several; None: the default one.

    Raises:
        ConfigurationError: if one is built on another optimizer, or the default one cannot be built.
    """
    if given is None:
        if any(group["lr"] is None for group in optimizer.param_groups):
            raise ConfigurationError(
                f"optimizer: the learning rate of {type(optimizer).__name__} is None, since it makes its own, so there "
                "is nothing that a schedule could change; give an lr_scheduler= that only reports it, as transformers' "
                "AdafactorSchedule(optimizer), or build the optimizer with a learning rate"
            )
        return [default_scheduler(optimizer, args, partial(planned_steps, args, loader))]
    schedulers = list(given) if isinstance(given, (list, tuple)) else [given]
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError("lr_scheduler: it is built on another optimizer than the one that is given")
    return schedulers


def default_scheduler(optimizer: Optimizer, args: TrainingArguments, max_steps: Callable[[], int]) -> LambdaLR:
    """A linear rise over ``warmup_steps``, then ``lr_scheduler_type`` down to zero at ``max_steps()``, or constant.

    ``max_steps`` is called each time: it may be raised between two calls of ``train()``.

    Raises:
        ConfigurationError: if the schedule decays, but the last step is unknown, since the data has no length.
    """
    if args.lr_scheduler_type != "constant" and max_steps() < 0:
        raise ConfigurationError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} needs the last step, and the data has no length; set "
            "max_steps, or use 'constant'"
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


class InitialHyperparameters:
    """Hyperparameters that the optimizer and the schedules were built with; loading a checkpoint replaces them."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._schedulers = [each for each in schedulers if hasattr(each, "base_lrs")]
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._base_lrs = [list(each.base_lrs) for each in self._schedulers]

    def values(self) -> dict[str, Any]:
        """Plain values by name; a list if the parameter groups differ."""
        peaks = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in self._groups]
        names = [name for name in peaks[0] if name not in ("params", "param_names", "initial_lr")]
        columns = {name: [_plain(group.get(name)) for group in peaks] for name in names}
        return {
            name: column[0] if all(each == column[0] for each in column) else column for name, column in columns.items()
        }

    def restore(self, *names: str) -> None:
        """Set these hyperparameters of the optimizer, say ``weight_decay``, to their initial values."""
        for group, built in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: built[name] for name in names})

    def restore_lrs(self) -> None:
        """Set the initial learning rates; the schedules continue from their present position."""
        if not self._schedulers:
            return
        shares = _shares(self._schedulers[-1])
        for scheduler, base_lrs in zip(self._schedulers, self._base_lrs, strict=True):
            scheduler.base_lrs = list(base_lrs)
        for group, built in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["initial_lr"] = built.get("initial_lr", built["lr"])
        self._set_rates(shares)

    def reapply_schedule(self) -> None:
        """Set the learning rates of the present position again: the schedule may have changed since the save."""
        if self._schedulers:
            self._set_rates(_shares(self._schedulers[-1]))

    def _set_rates(self, shares: list[float]) -> None:
        groups = self._optimizer.param_groups
        for group, share in zip(
            groups, shares if len(shares) == len(groups) else shares[:1] * len(groups), strict=True
        ):
            rate = group["initial_lr"] * share
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for scheduler in self._schedulers:
            scheduler._last_lr = [group["lr"] for group in groups]


def _shares(scheduler: Any) -> list[float]:
    """Each group's learning rate at the schedule's position, as a fraction of its base rate."""
    if isinstance(scheduler, LambdaLR):
        return [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    pairs = zip(scheduler.get_last_lr(), scheduler.base_lrs, strict=True)
    return [rate / base if base else 1.0 for rate, base in pairs]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else str(tuple(value.shape))
    return list(value) if isinstance(value, tuple) else value if isinstance(value, bool | int | float) else str(value)


def form_check(target: object) -> ScheduleForm | None:
    """Check of the saved state of torch's own classes, which declare no schema; None for all others."""
    return ScheduleForm(target) if isinstance(target, LRScheduler | torch.amp.GradScaler) else None


class ScheduleForm:
    """Compares a saved state with the present one of a schedule, or of torch's gradient scaler.

    ``load_state_dict`` of torch's schedules checks nothing: it sets attributes, and would replace methods too.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __call__(self, state: Any, where: str) -> None:
        """
        Raises:
            StateMismatch: if a value has another type than the present one, or would replace a method.
        """
        present = self._scheduler.state_dict()
        check(state, dict[str, Any], where)
        forms = _PER_GROUP | _COUNTS
        check_like({name: value for name, value in state.items() if name not in forms}, present, where)
        for name in state:
            if name in forms:
                check(state[name], forms[name], f"{where}.{name}")
            elif name not in present and hasattr(self._scheduler, str(name)):
                raise StateMismatch(f"{where}: contains {name!r}, which {type(self._scheduler).__name__} does not save")
        lengths = {name: len(state[name]) for name in _PER_GROUP if name in state}
        if len({*lengths.values()}) > 1:
            raise StateMismatch(f"{where}: must be equally long, one item for each parameter group: {lengths}")


_Rate = Annotated[Any, Must("a learning rate", lambda rate: not isinstance(rate, str) and [float(rate)])]
_PER_GROUP = {
    **dict.fromkeys(["base_lrs", "_last_lr", "min_lrs", "max_lrs"], list[_Rate]),
    "lr_lambdas": list[dict[str, Any] | None],
}
"""Lists with an item for each parameter group of the optimizer that was saved; the present one may have others."""
_COUNTS = {"last_epoch": int, "_step_count": int}


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
