"""The ``trainer`` argument of Cerebras's callbacks: the attributes that they use most; others raise an error."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.contexts import Context
from dalsegno.state import TrainerState


class StandIn:
    """Base of stand-ins for Cerebras's objects. Reading an attribute without a counterpart raises an error."""

    _stands_for: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        present = sorted(each for each in dir(self) if not each.startswith("_"))
        raise AttributeError(
            f"{self._stands_for}.{name}: dalsegno has no counterpart of it; available: {', '.join(present)}"
        )


class Backend(StandIn):
    """Stands in for ``trainer.backend``."""

    _stands_for = "trainer.backend"
    is_csx = False
    is_e2e_execution = True
    is_tracing = False

    def __init__(self, model: nn.Module) -> None:
        self.torch_device = self.device = device_of(model)
        self.is_cpu = self.device.type == "cpu"
        self.is_gpu = self.device.type == "cuda"


class Loop(StandIn):
    """Stands in for ``trainer.loop``, the training loop, with its ``val_loop``."""

    _stands_for = "trainer.loop"

    def __init__(self, context: Context) -> None:
        args, self._state = context.args, context.state
        self._accumulation = args.accumulation
        self.num_steps = None
        self.max_steps = args.max_steps if args.max_steps > 0 else None
        self.num_epochs = None if args.max_steps > 0 else args.num_train_epochs
        self.eval_frequency = args.evaluation.steps or None
        self.train_only = not args.evaluation
        self.val_loop = ValidationLoop()

    @property
    def grad_accum_steps(self) -> int:
        """Of the next step."""
        return self._accumulation.at(self._state.global_step)

    @property
    def total_steps(self) -> int:
        """-1 where the data's length is unknown."""
        return self._state.max_steps


class ValidationLoop(StandIn):
    """Stands in for the validation loop, which always covers the whole set."""

    _stands_for = "loop"
    eval_steps = None


class EarlyExit(StandIn):
    """Stands in for ``trainer.early_exit``: training ends when a registered function returns True.

    Functions are unregistered when their leg ends.
    """

    _stands_for = "trainer.early_exit"

    def __init__(self) -> None:
        self._functions: list[Callable[[], Any]] = []

    def register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """Call ``function(*args, **kwargs)`` at the end of each step."""

        def call() -> Any:
            return function(*args, **kwargs)

        self._functions.append(call)
        return Handle(self._functions, call)

    @property
    def should_exit(self) -> bool:
        return any([bool(call()) for call in self._functions])  # noqa: C419  (all are called, whatever one returns)

    def reset_exit_fns(self) -> None:
        self._functions.clear()


class Handle:
    """Removes one item from a list."""

    def __init__(self, items: list[Any], item: object) -> None:
        self._items = items
        self._item = item

    def remove(self) -> None:
        if self._item in self._items:
            self._items.remove(self._item)


class Trainer(StandIn):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    _stands_for = "trainer"
    is_tracing = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        self.model: nn.Module = context.model
        self.optimizer: Optimizer = context.optimizer
        schedulers = context.lr_scheduler
        self.schedulers: list[Any] = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        self.logger = logging.getLogger("dalsegno")
        self.backend = Backend(context.model)
        self.loop = Loop(context)
        self.early_exit = EarlyExit()
        self.model_dir: Path = context.args.directory
        self.precision = None
        self.should_run_optimizer_step = False
        """Whether the optimizer step follows this micro-batch."""
        self.batch_idx = -1
        self.collected: dict[str, Any] | None = None
        """Values for the next record; None where no record is due."""
        self.is_silent = False
        """Whether logged values are dropped, because this step has no record."""
        self._scopes: list[str] = []

    @contextmanager
    def as_of(self, state: TrainerState) -> Iterator[None]:
        """Have the progress of ``state`` inside: that of a checkpoint, which may be of an earlier step."""
        live, self._state = self._state, state
        try:
            yield
        finally:
            self._state = live

    @property
    def global_step(self) -> int:
        return self._state.global_step

    @property
    def is_log_step(self) -> bool:
        return self._state.will_log

    @property
    def is_first_iteration(self) -> bool:
        """Whether this is the first micro-batch of the current stretch of training."""
        return self.batch_idx == 0

    @property
    def artifact_dir(self) -> Path:
        return self.model_dir

    @property
    def summary_dir(self) -> Path:
        return self.model_dir / "logs"

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
        """
        Raises:
            ValueError: if this trainer does not have the callback.
        """
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
            self._context.trainer.log({name: plain(value) for name, value in named.items()})

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


def plain(value: Any) -> Any:
    """Return a tensor of one element as a number (which waits for its device), any other value unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
