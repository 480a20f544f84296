"""Trainer: the first argument of Lightning's callbacks, with the attributes that they use; others raise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.interop.stand_in import reads

from .measured import Measured
from .parts import FitLoop, Logger, LoggerConnector, OnRanks, Strategy, TrainerState


class Trainer(OnRanks):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    _stands_for = "trainer"
    sanity_checking = testing = predicting = fast_dev_run = False
    check_val_every_n_epoch = None  # so that callbacks act after evaluations, which are scheduled in steps
    datamodule = None
    min_epochs = min_steps = None
    num_nodes = 1

    def __init__(self, shared: Measured, module: Callable[[Measured, Trainer], Any]) -> None:
        context = shared.context
        self._shared, self._context, self._state = shared, context, context.state
        self.model = context.model
        self.lightning_module = module(shared, self)
        self.optimizers = [context.optimizer]
        self.strategy = Strategy(device_of(context.model))
        self.logger = Logger(shared)
        self.loggers = [self.logger]
        self.state = TrainerState(shared)
        self.fit_loop = FitLoop(self, shared)
        self.default_root_dir = self.log_dir = str(context.args.directory)
        self.precision = "bf16-mixed" if context.args.bf16 else "16-mixed" if context.args.fp16 else "32-true"
        self._logger_connector = LoggerConnector(shared)
        schedulers = context.lr_scheduler
        self.lr_scheduler_configs = [
            SimpleNamespace(
                scheduler=each,
                name=None,
                interval="step",
                frequency=1,
                reduce_on_plateau=False,
                monitor=None,
                strict=True,
            )
            for each in (schedulers if isinstance(schedulers, (list, tuple)) else [schedulers])
            if each is not None
        ]

    # -- progress

    global_step: int = reads("_state.global_step")
    """Finished steps."""
    current_epoch: int = reads("_shared.epoch")
    max_steps: int = reads("_state.max_steps")

    @property
    def estimated_stepping_batches(self) -> float:
        return self._state.max_steps if self._state.max_steps > 0 else math.inf

    @property
    def max_epochs(self) -> int:
        """-1 if ``max_steps`` ends the run."""
        args = self._context.args
        return -1 if args.max_steps > 0 else math.ceil(args.num_train_epochs)

    @property
    def accumulate_grad_batches(self) -> int:
        """Of the next step. It cannot be set: ``gradient_accumulation_schedule`` changes it."""
        return self._context.args.accumulation.at(self._state.global_step)

    @property
    def training(self) -> bool:
        return self._shared.fitting and not self._shared.validating

    validating: bool = reads("_shared.validating")
    ckpt_path: str | None = reads("_shared.resumed_from")
    """The checkpoint that this leg was resumed from."""

    # -- metrics

    callback_metrics: dict[str, Any] = reads("_shared.metrics")
    """The newest value of each metric, as tensors, under dalsegno's and Lightning's usual names."""

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def log_every_n_steps(self) -> int:
        return int(self._context.args.logging.steps or 0)

    # -- stopping

    @property
    def should_stop(self) -> bool:
        return self._context.control.should_training_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        """True ends the run after this step, with a checkpoint."""
        if value and not self._context.control.should_training_stop:
            self._context.control.stop("it set trainer.should_stop", final=True)

    # -- data

    train_dataloader: Any = reads("_context.train_dataloader")

    @property
    def val_dataloaders(self) -> Any:
        loaders = self._context.eval_dataloader
        return list(loaders.values()) if isinstance(loaders, Mapping) else loaders

    @property
    def num_training_batches(self) -> float:
        return _length(self._context.train_dataloader)

    @property
    def num_val_batches(self) -> list[float]:
        loaders = self.val_dataloaders
        several = loaders if isinstance(loaders, list) else [] if loaders is None else [loaders]
        return [_length(loader) for loader in several]

    @property
    def val_check_interval(self) -> int:
        """Steps between evaluations; 0 where they are not scheduled in steps."""
        return int(self._context.args.evaluation.steps or 0)

    @property
    def enable_validation(self) -> bool:
        return bool(self._context.args.evaluation) and self._context.eval_dataloader is not None

    # -- ranks

    num_devices = OnRanks.world_size

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on this host's first rank."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    # -- parts

    @property
    def callbacks(self) -> list[Any]:
        """Every callback; those of other libraries without their adapters."""
        return [inspect.unwrap(callback) for callback in self._context.trainer.callbacks]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [each for each in self.callbacks if type(each).__name__ == "EarlyStopping"]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """None: dalsegno saves by itself."""
        return []

    checkpoint_callback = None


def _length(loader: Any) -> float:
    """Batches of a loader; infinity where their number is unknown."""
    try:
        return len(loader)
    except TypeError:
        return math.inf
