"""The ``trainer`` argument of Cerebras's callbacks: the attributes that they use most; others raise an error."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dalsegno.distributed import accelerator
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.contexts import Context
from dalsegno.interop.stand_in import StandIn, TrainerStandIn, reads
from dalsegno.system import filesystem

from .schedule import Position, Schedule

PACKAGES = ("cerebras", "dalsegno.interop.cerebras")
"""Packages that define base classes of callbacks."""


class Backend(StandIn):
    _stands_for = "trainer.backend"
    is_csx = False
    is_e2e_execution = True
    is_tracing = False

    def __init__(self, model: nn.Module) -> None:
        self.torch_device = self.device = device_of(model)
        self.is_cpu = self.device.type == "cpu"
        self.is_gpu = self.device.type == "cuda"
        self._impl = self


class Loop(StandIn):
    """Stands in for ``trainer.loop``, the training loop, with its ``val_loop``."""

    _stands_for = "trainer.loop"
    num_trains: int = reads("_schedule.epochs")
    """Stretches of training in this fit."""
    train_steps: int | None = reads("_schedule.train_steps")
    """Steps of the current stretch."""
    total_steps: int = reads("_state.max_steps")
    """-1 where the data's length is unknown."""

    def __init__(self, context: Context, schedule: Schedule) -> None:
        args, self._state = context.args, context.state
        self._schedule = schedule
        self._accumulation = args.accumulation
        self.num_steps = None
        self.max_steps = args.max_steps if args.max_steps > 0 else None
        self.num_epochs = None if args.max_steps > 0 else args.num_train_epochs
        self.eval_frequency = args.evaluation.steps or None
        self.train_only = not args.evaluation
        self.val_loop = ValidationLoop(schedule)

    @property
    def grad_accum_steps(self) -> int:
        """Of the next step."""
        return self._accumulation.at(self._state.global_step)


class ValidationLoop(StandIn):
    """Stands in for the validation loop, which always covers the whole set."""

    _stands_for = "loop"
    on_start_hook = "on_validate_start"
    on_end_hook = "on_validate_end"
    on_step_start_hook = "on_validate_step_start"
    on_step_end_hook = "on_validate_step_end"
    on_batch_start_hook = "on_validate_batch_start"
    on_batch_end_hook = "on_validate_batch_end"
    eval_steps: int | None = reads("_schedule.current_stage.steps")
    """Batches of the evaluation set; None where their number is unknown."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule


class Logging(StandIn):
    _stands_for = "trainer.logging"
    log_level = "INFO"
    enable_act_frequency = False

    def __init__(self, context: Context) -> None:
        self.log_steps = context.args.logging.steps or None

    def is_log_step(self, trainer: Trainer) -> bool:
        return trainer.is_log_step


class Executor(StandIn):
    _stands_for = "trainer.executor"
    artifact_dir: Path = reads("_trainer.artifact_dir")
    on_first_iteration: bool = reads("_trainer.is_first_iteration")
    on_final_iteration: bool = reads("_trainer.is_final_iteration")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def user_iteration(self) -> int:
        """Of the batch in progress in its stage, from 1."""
        return self._trainer.schedule.batch_idx + 1


class CheckpointSettings(StandIn):
    _stands_for = "trainer.checkpoint"
    disable_strict_checkpoint_loading = False

    def __init__(self, context: Context) -> None:
        self.steps = context.args.save_steps or None


class EarlyExit(StandIn):
    """Stands in for ``trainer.early_exit``: training ends when a registered function returns True.

    Functions are unregistered when their leg ends.
    """

    _stands_for = "trainer.early_exit"

    def __init__(self) -> None:
        self._functions: OrderedDict[int, Callable[[], Any]] = OrderedDict()

    def register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RemovableHandle:
        """Call ``function(*args, **kwargs)`` at the end of each step."""
        handle = RemovableHandle(self._functions)
        self._functions[handle.id] = partial(function, *args, **kwargs)
        return handle

    @property
    def should_exit(self) -> bool:
        answers = [call() for call in tuple(self._functions.values())]  # all are called, whatever one returns
        return any(answers)

    def reset_exit_fns(self) -> None:
        self._functions.clear()


class Trainer(TrainerStandIn):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    is_tracing = False
    global_step: int = reads("_state.global_step")
    batch_idx: int = reads("position.batch_idx")
    """Index of the micro-batch within this stretch of training."""
    summary_dir: Path = reads("artifact_dir")

    def __init__(self, context: Context) -> None:
        super().__init__(context.state)
        self._context = context
        self.model: nn.Module = context.model
        self.optimizer: Optimizer = context.optimizer
        schedulers = context.lr_scheduler
        self.schedulers: list[Any] = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        self.logger = logging.getLogger("dalsegno")
        self.backend = Backend(context.model)
        self.position = Position()
        self.schedule = Schedule(context, self.position)
        self.loop = Loop(context, self.schedule)
        self.logging = Logging(context)
        self.executor = Executor(self)
        self.checkpoint = CheckpointSettings(context)
        self.activation_steps = None
        self.validation_callbacks: list[Any] = []
        self._artifacts: Path | None = None
        self.early_exit = EarlyExit()
        self.model_dir: Path = context.args.directory
        self.precision = None
        self.should_run_optimizer_step = False
        """Whether the optimizer step follows this micro-batch."""
        self.collected: dict[str, Any] | None = None
        """Values for the next record; None where no record is due."""
        self.is_silent = False
        """Whether logged values are dropped, because this step has no record."""
        self._scopes: list[str] = []

    @property
    def is_log_step(self) -> bool:
        """Whether this step is logged; in a validation, whether this batch is: each ``logging_steps``, and the last."""
        if self.position.val_name is None:
            return self._state.will_log
        steps = self.logging.log_steps
        return self.is_final_iteration or bool(steps and self.executor.user_iteration % steps == 0)

    @property
    def is_first_iteration(self) -> bool:
        """Whether this is the first batch of the current stretch of training, or validation."""
        return self.schedule.batch_idx == 0

    @property
    def is_final_iteration(self) -> bool:
        """Whether this is the last batch of the current stretch of training, or validation; False if not known."""
        position = self.position
        if position.val_name is not None:
            return position.val_batch_idx + 1 == position.val_batches
        step = self._state.global_step - position.is_counted
        is_last = self.should_run_optimizer_step or position.microbatch + 1 >= self._context.args.accumulation.at(step)
        return is_last and position.ends_stretch

    @property
    def artifact_dir(self) -> Path:
        """A directory for this trainer's files, below ``cerebras_logs``."""
        if self._artifacts is None:
            name = f"{datetime.now():%Y%m%d_%H%M%S}"
            self._artifacts = filesystem.numbered(self.model_dir / "cerebras_logs", name)
            filesystem.make_directory(self._artifacts)
        return self._artifacts

    @property
    def loggers(self) -> list[Any]:
        """Callbacks to which logged metrics are passed."""
        return [callback for callback in self.all_callbacks if is_logger(callback)]

    def save_checkpoint(self) -> None:
        """Request a checkpoint at the end of this step."""
        self._context.control.should_save = True

    @property
    def callbacks(self) -> OrderedDict[str, Any]:
        """Every callback by its key; those of other libraries without their adapters."""
        present = getattr(self._context.trainer, "callbacks", [])
        return OrderedDict((callback.key, inspect.unwrap(callback)) for callback in present)

    @property
    def all_callbacks(self) -> Iterator[Any]:
        yield from self.callbacks.values()

    def get_callbacks(self, callback_type: type) -> Iterator[Any]:
        """Yield the callbacks of a class."""
        return (callback for callback in self.all_callbacks if isinstance(callback, callback_type))

    def get_callback(self, callback_type: type) -> Any:
        """Return the first callback of a class; None if there is none."""
        return next(self.get_callbacks(callback_type), None)

    def get_callback_name(self, callback: object) -> str:
        """Raises ValueError if this trainer does not have the callback."""
        for name, each in self.callbacks.items():
            if each is callback:
                return name
        raise ValueError(f"{type(callback).__name__} is not a callback of this trainer")

    def log_metrics(self, **metrics: Any) -> None:
        """Add metrics to the record of this step or evaluation; drop them at a step without a record.

        Outside of steps and evaluations, they are logged as a separate record.
        """
        self.log_metrics_dict(metrics)

    def log_metrics_dict(self, metrics: dict[str, Any], step: int | None = None, dest: Any = None) -> None:
        """Like :meth:`log_metrics`; ``step`` and ``dest`` are ignored."""
        named = {f"{self.name_scope_path}{name}": value for name, value in metrics.items()}
        if self.collected is not None:
            self.collected.update(named)
        elif not self.is_silent:
            self._context.trainer.log(plain(named))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[str]:
        """Prefix the names of metrics that are logged inside with ``name/``."""
        self._scopes.append(name)
        try:
            yield name
        finally:
            self._scopes.pop()

    @property
    def name_scope_path(self) -> str:
        return "".join(f"{name}/" for name in self._scopes)


def is_logger(callback: object) -> bool:
    """Whether a callback derives from the library's ``Logger``."""
    return any(
        cls.__name__ == "Logger" and cls.__module__.startswith(tuple(f"{package}." for package in PACKAGES))
        for cls in type(callback).__mro__
    )


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics as values that a record can have; reading a tensor waits for its device.

    A tensor of several elements becomes its mean, std, min and max, as ``LogInputSummaries`` names them.
    """
    record: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            record |= _summary(name, value)
        elif isinstance(value, (torch.Tensor, np.generic)):
            record[name] = value.item()
        elif isinstance(value, float):  # without the subclass, which a checkpoint could not contain
            record[name] = float(value)
        else:
            record[name] = value
    return record


def _summary(name: str, tensor: torch.Tensor) -> dict[str, float]:
    flat = accelerator.wide(tensor.detach()).flatten()
    if not flat.numel():
        return {}
    numbers = torch.stack([flat.mean(), flat.std(correction=0), flat.min(), flat.max()]).tolist()
    return {f"{name}/{what}": number for what, number in zip(("mean", "std", "min", "max"), numbers, strict=True)}
