"""Learning rates: the schedules of a run, rates that a command scales, and rates of a resumed run.

1. Rates of parameter groups: read, set, and scaled by a command together with the rest of their schedules.
2. Schedules: those that the user passes, or the one that ``TrainingArguments`` describe.
3. After a load: the rates and other hyperparameters that the user has changed, and groups that the training has added.
4. Checks of a saved schedule before it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from dalsegno.args import TrainingArguments
from dalsegno.data import ResumableLoader
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import EvaluateContext
from dalsegno.stateful.schema import Must, check, check_like

from .optimizers import unwrapped_optimizer


def check_scalable(optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Raises ConfigurationError if there is no learning rate to change, or a schedule computes its rates from something
    other than base rates that could be scaled, so that it would undo the change at its next step."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigurationError(f"learning_rate: {type(optimizer).__name__} computes its own; there is none to change")
    for scheduler in flat(schedulers_of(optimizer, schedulers)):
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
    schedulers = schedulers_of(optimizer, schedulers)
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


def schedulers_of(optimizer: Optimizer, schedulers: Iterable[Any]) -> list[Any]:
    """Those of this optimizer: a loop of the user's own may have several."""
    return [each for each in schedulers if getattr(each, "optimizer", optimizer) is optimizer]


def several(given: Any) -> list[Any]:
    """One or several, or None, as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _is_composite(scheduler: Any) -> bool:
    return isinstance(scheduler, SequentialLR | ChainedScheduler)


def build_schedulers(given: Any, optimizer: Optimizer, args: TrainingArguments, plan: StepPlan) -> list[Any]:
    """The learning rate schedules that the user passes, one or several; None: the one from ``args``."""
    if given is None:
        if any(group["lr"] is None for group in optimizer.param_groups):
            raise ConfigurationError(
                f"optimizer: the learning rate of {type(optimizer).__name__} is None, since it makes its own, so there "
                "is nothing that a schedule could change; give an lr_scheduler= that only reports it, as transformers' "
                "AdafactorSchedule(optimizer), or build the optimizer with a learning rate"
            )
        return [scheduler_from_args(optimizer, args, plan)]
    schedulers = several(given)
    for scheduler in schedulers:
        if unwrapped_optimizer(getattr(scheduler, "optimizer", optimizer)) is not optimizer:
            raise ConfigurationError("lr_scheduler: it is built on another optimizer than the one that is given")
    return schedulers


def scheduler_from_args(optimizer: Optimizer, args: TrainingArguments, max_steps: Callable[[], int]) -> LambdaLR:
    """A linear rise over the warm-up, then ``lr_scheduler_type`` down to ``min_lr`` at ``max_steps()``, or constant.
    ``max_steps`` is called each time: it may be raised between two calls of ``train()``."""
    if max_steps() < 0 and (has_end(args) or args.warmup_ratio):
        needs = f"lr_scheduler_type={args.lr_scheduler_type!r}" if not args.warmup_ratio else "warmup_ratio"
        raise ConfigurationError(
            f"{needs} needs the last step, and the data has no length; set max_steps, or 'constant' with warmup_steps"
        )
    lowest = args.min_lr / args.learning_rate if args.learning_rate else 0.0
    kind, options, is_constant = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}, not has_end(args)

    def factor(step: int) -> float:
        last = max_steps()
        warmup = args.warmup_steps or math.ceil(args.warmup_ratio * last)
        if step < warmup:
            return step / warmup
        if kind == "inverse_sqrt":
            scale = options.get("timescale") or warmup or 10_000
            return max(lowest, math.sqrt(scale / (step - warmup + scale)))
        if is_constant:
            return 1.0
        begin, shape = warmup, kind
        if kind in _STABLE:
            begin = max(warmup, last - int(options.get("num_decay_steps") or math.ceil(args.decay_ratio * last)))
            shape = options.get("decay_type", _STABLE[kind])
        left = min(1.0, max(0.0, (last - step) / max(1, last - begin)))
        done = min(1.0, max(0.0, (step - begin) / max(1, last - begin)))
        return lowest + (1 - lowest) * _decayed(shape, left, done, options)

    return LambdaLR(optimizer, factor)


_STABLE = {"wsd": "linear", "warmup_stable_decay": "cosine"}
"""Schedules that decay at the end only, and the shape in which they do."""


def has_end(args: TrainingArguments) -> bool:
    """Whether the schedule depends on the last step."""
    return args.lr_scheduler_type not in ("constant", "constant_with_warmup", "inverse_sqrt")


def _decayed(shape: str, left: float, done: float, options: Mapping[str, Any]) -> float:
    """Factor, 1 to 0, when the fraction ``done`` of the decay lies behind, and ``left`` ahead."""
    if shape == "cosine_with_restarts":
        return 0.5 * (1 + math.cos(math.pi * (options.get("num_cycles", 1) * done % 1))) if left else 0.0
    if shape.startswith("cosine"):
        return 0.5 * (1 - math.cos(math.pi * left))
    if shape == "polynomial":
        return float(left ** options.get("power", 1.0))
    return 1 - math.sqrt(done) if shape == "1-sqrt" else left


class StepPlan:
    """Called: the steps of the whole run; -1 if ``max_steps`` is not set and the length of the data is unknown.

    Epochs are counted from the start of the run, or from where a leg last changed what one step reads.
    """

    def __init__(self, args: TrainingArguments, loader: ResumableLoader) -> None:
        self._args, self._loader = args, loader
        self.since: tuple[int, float] = (0, 0.0)
        """Finished steps, and the position in epochs, from which on steps read as many samples as now."""

    def __call__(self) -> int:
        args = self._args
        if args.max_steps > 0:
            return args.max_steps
        accumulation = args.accumulation
        microbatches = self._loader.microbatches_per_epoch()
        if microbatches is None:
            return -1
        step, position = self.since
        epochs = math.ceil(position)
        if epochs > position:
            rest = min(epochs, args.num_train_epochs) - position
            step += accumulation.steps_to_consume(math.ceil(round(rest * self._batches(microbatches), 6)), step)
        if epochs >= args.num_train_epochs:
            return step
        while step < accumulation.last_change and epochs + 1 <= args.num_train_epochs:
            step += accumulation.steps_to_consume(microbatches, step)
            epochs += 1
        if step < accumulation.last_change:
            left = math.ceil(args.num_train_epochs * microbatches) - epochs * microbatches
            return step + accumulation.steps_to_consume(left, step)
        each = accumulation.steps_to_consume(microbatches, step)  # of all later epochs
        return step + math.ceil(args.num_train_epochs * each) - epochs * each

    def _batches(self, microbatches: int) -> float:
        """Micro-batches of an epoch, the last one as the part of a whole one that it is, if that is known."""
        samples, each = self._loader.samples_per_epoch(), self._loader.samples_per_microbatch()
        return samples / each if samples and each else microbatches


class PlateauStep(Callback):
    """Steps each ``ReduceLROnPlateau`` among the schedulers with ``metric``, after every evaluation that has it."""

    def __init__(self, schedulers: Sequence[Any], metric: str) -> None:
        self._schedulers = [each for each in schedulers if isinstance(each, ReduceLROnPlateau)]
        self._metric = metric

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        if self._metric in ctx.metrics:
            for scheduler in self._schedulers:
                scheduler.step(ctx.metrics[self._metric])


class InitialHyperparameters:
    """Hyperparameters that the optimizer and the schedules were built with; loading a checkpoint replaces them."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._given = schedulers_of(optimizer, schedulers)
        self._schedulers = [each for each in self._given if hasattr(each, "base_lrs")]
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


def form_check(target: object) -> Callable[[Any, str], None] | None:
    """Check of the saved state of torch's own schedules and gradient scaler, which declare no schema; None for all
    others.

    ``load_state_dict`` of torch's schedules checks nothing: it sets attributes, and would replace methods too.
    """
    if not isinstance(target, LRScheduler | torch.amp.GradScaler):
        return None

    def check_form(state: Any, where: str) -> None:
        present = target.state_dict()
        check(state, dict[str, Any], where)
        forms = _PER_GROUP | _COUNTS
        check_like({name: value for name, value in state.items() if name not in forms}, present, where)
        for name in state:
            if name in forms:
                check(state[name], forms[name], f"{where}.{name}")
            elif name not in present and hasattr(target, str(name)):
                raise StateMismatch(f"{where}: contains {name!r}, which {type(target).__name__} does not save")
        lengths = {name: len(state[name]) for name in _PER_GROUP if name in state}
        if len({*lengths.values()}) > 1:
            raise StateMismatch(f"{where}: must be equally long, one item for each parameter group: {lengths}")

    return check_form


_Rate = Annotated[Any, Must("a learning rate", lambda rate: not isinstance(rate, str) and [float(rate)])]
_PER_GROUP = {
    **dict.fromkeys(["base_lrs", "_last_lr", "min_lrs", "max_lrs"], list[_Rate]),
    "lr_lambdas": list[dict[str, Any] | None],
}
"""Lists with an item for each parameter group of the optimizer that was saved; the present one may have others."""
_COUNTS = {"last_epoch": int, "_step_count": int}
