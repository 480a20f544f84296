"""Learning rates of parameter groups: read, set, and scaled by command together with the rest of their schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from dalsegno.errors import ConfigurationError


def check_scalable(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Raises ConfigurationError if there is no learning rate to change, or a schedule computes its rates from something
    other than base rates that could be scaled, so that it would undo the change at its next step."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigurationError(f"learning_rate: {type(optimizer).__name__} computes its own; there is none to change")
    for scheduler in flat(schedulers):
        if not (hasattr(scheduler, "base_lrs") or isinstance(scheduler, ReduceLROnPlateau) or _is_composite(scheduler)):
            raise ConfigurationError(
                f"learning_rate: the schedule {type(scheduler).__name__} has no base_lrs that could be scaled, and "
                "would undo the change at its next step"
            )


def present_rate(optimizer: Optimizer) -> float:
    """Learning rate of the first parameter group, in the next step."""
    return float(optimizer.param_groups[0]["lr"])


def scale_rates(optimizer: Optimizer, schedulers: Sequence[Any], factor: float) -> None:
    """Multiply every group's learning rate, and what its schedules make of it from here on, by ``factor``.

    Absolute bounds of a schedule are scaled too (the maximum of a cycle, the minimum of a cosine), except the minimum
    of ``ReduceLROnPlateau``, which limits only its own reductions.
    """
    simple = [each for each in flat(schedulers) if not _is_composite(each)]
    names = {"lr", "initial_lr"}
    if any(isinstance(each, OneCycleLR) for each in simple):
        names |= {"max_lr", "min_lr"}  # from which it interpolates
    for group in optimizer.param_groups:
        for name in names & group.keys():
            group[name] = _scaled(group[name], factor)
    for scheduler in simple:
        for name in ("base_lrs", "max_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [_scaled(rate, factor) for rate in getattr(scheduler, name)])
        if isinstance(scheduler, CosineAnnealingLR | CosineAnnealingWarmRestarts):
            scheduler.eta_min = _scaled(scheduler.eta_min, factor)
    for scheduler in flat(schedulers):
        if hasattr(scheduler, "_last_lr"):
            scheduler._last_lr = [copied(group["lr"]) for group in optimizer.param_groups]


def _scaled(rate: Any, factor: float) -> Any:
    """A tensor is changed in place: a compiled or captured optimizer reads this one."""
    return rate.mul_(factor) if isinstance(rate, torch.Tensor) else rate * factor


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a parameter group's rate. A tensor is changed in place, as by :func:`scale_rates`."""
    present = group["lr"]
    if not isinstance(present, torch.Tensor):
        group["lr"] = rate
    elif isinstance(rate, torch.Tensor):
        present.copy_(rate)
    else:
        present.fill_(rate)


def copied(rate: Any) -> Any:
    """A rate that does not change with ``rate``."""
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def flat(schedulers: Iterable[Any]) -> Iterator[Any]:
    """The schedules, and those inside composite ones."""
    for scheduler in schedulers:
        yield scheduler
        if _is_composite(scheduler):
            yield from flat(scheduler._schedulers)


def _is_composite(scheduler: Any) -> bool:
    return isinstance(scheduler, SequentialLR | ChainedScheduler)
