"""Hyperparameters of optimizer and learning rate schedules after a load, and checks of what is loaded into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dalsegno.errors import StateMismatch
from dalsegno.stateful.schema import Must, check, check_like

from .learning_rate import copied, flat, set_rate


class InitialHyperparameters:
    """Hyperparameters that the optimizer and the schedules were built with; loading a checkpoint replaces them."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._given = schedulers
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
        """Set these hyperparameters of the optimizer, say ``weight_decay``, to their initial values. Groups that the
        training has added keep theirs."""
        for group, built in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update({name: built[name] for name in names})

    def follow_groups(self) -> bool:
        """Make the schedules have as many groups as the optimizer, after a load. Returns whether a schedule's function
        of an added group is a guess: functions are not saved."""
        count = len(self._optimizer.param_groups)
        is_guess = any(len(getattr(each, "lr_lambdas", ())) not in (0, count) for each in flat(self._given))
        follow_groups(self._optimizer, self._given)
        return is_guess and count > len(self._groups)

    def restore_lrs(self) -> None:
        """Set the initial learning rates; the schedules continue from their present position."""
        if not self._schedulers:
            return
        shares = _shares(self._schedulers[-1])
        for scheduler, base_lrs in zip(self._schedulers, self._base_lrs, strict=True):
            scheduler.base_lrs = [*base_lrs, *scheduler.base_lrs[len(base_lrs) :]]
        for group, built in zip(self._optimizer.param_groups, self._groups, strict=False):
            group["initial_lr"] = built.get("initial_lr", built["lr"])
        self._set_rates(shares)

    def reapply_schedule(self) -> None:
        """Set the learning rates of the present position again: the schedule may have changed since the save."""
        if self._schedulers:
            self._set_rates(_shares(self._schedulers[-1]))

    def _set_rates(self, shares: list[float]) -> None:
        groups = self._optimizer.param_groups
        shares = shares if len(shares) == len(groups) else shares[:1] * len(groups)
        for group, share in zip(groups, shares, strict=True):
            set_rate(group, group["initial_lr"] * share)
        for scheduler in self._schedulers:
            scheduler._last_lr = [group["lr"] for group in groups]


def follow_groups(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Make schedules have as many groups as the optimizer, to which the training may add some.

    The learning rate with which a group was added is its base rate, and the factors are those of the last group.
    """
    groups = optimizer.param_groups
    for scheduler in flat(schedulers):
        base_lrs, factors = getattr(scheduler, "base_lrs", groups), getattr(scheduler, "lr_lambdas", groups)
        added = groups[len(base_lrs) :]
        if len(factors) != len(groups):
            scheduler.lr_lambdas = [*factors, *factors[-1:] * (len(groups) - len(factors))][: len(groups)]
        if len(base_lrs) != len(groups):
            rates = [group.setdefault("initial_lr", copied(group["lr"])) for group in added]
            scheduler.base_lrs = [*base_lrs, *map(copied, rates)][: len(groups)]
        if isinstance(scheduler, LambdaLR):
            for group, factor in zip(added, scheduler.lr_lambdas[len(groups) - len(added) :], strict=True):
                set_rate(group, group["initial_lr"] * factor(scheduler.last_epoch))


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
        """Raises StateMismatch if a value has another type than the present one, or would replace a method."""
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
