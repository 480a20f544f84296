"""Lightning's dialect: callbacks of ``lightning`` or ``pytorch_lightning``.

:data:`ROWS` is the whole order. A *batch* is a micro-batch: the ``on_train_batch_end`` of a step's last one
comes after the update. The state is what ``state_dict`` returns, and what ``on_save_checkpoint`` puts into its dict,
which has the epoch and the step, but neither the model's state nor other callbacks'.

At first the trainer and the module as callbacks see them: the attributes that they use; others raise an error.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from dalsegno.data.loader import length_of
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.contexts import Context, LogContext, TrainBeginContext, TrainEndContext
from dalsegno.events.table import Event
from dalsegno.interop.stand_in import Progress, Row, StandIn, TableAdapter, Values, numbers_of, reads
from dalsegno.logs import is_wall_clock
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Count

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class LightningState(TypedDict):
    batches: Count
    metrics: dict[str, Any]


class SharedState(Progress):
    """What all of Lightning's callbacks share in one run. The newest metrics are saved with the run."""

    name = "lightning"
    state_schema = LightningState
    state_compared = False  # what a callback logs may differ between ranks, as in Lightning

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.metrics: dict[str, Any] = {}
        """``trainer.callback_metrics``."""
        self.resumed_from: str | None = None
        self.trainer = Trainer(self)
        self.module = self.trainer.lightning_module

    def log(self, values: Mapping[str, Any]) -> None:
        """Log what a callback has measured."""
        self.collected.add(values)
        self.metrics |= {name: torch.as_tensor(value).detach() for name, value in values.items()}

    def position(self) -> dict[str, int]:
        """What a checkpoint's dict has when a callback gets it."""
        return {"epoch": self.epoch, "global_step": self.context.state.global_step}

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        super().on_train_begin(ctx)
        self.resumed_from = None if ctx.resumed_from is None else str(ctx.resumed_from)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        super().on_train_end(ctx)
        self.epoch = int(ctx.state.epoch)  # as Lightning counts from here on: the epochs that have ended

    def on_log(self, ctx: LogContext) -> None:
        for name, value in ctx.logs.items():
            if isinstance(value, (int, float)) and not is_wall_clock(name):
                self.metrics[name] = self.metrics[_their_name(name)] = torch.tensor(float(value))

    def state_dict(self) -> LightningState:
        return {"batches": self.batches, "metrics": self.metrics}

    def load_state_dict(self, state: LightningState) -> None:
        self.batches, self.metrics = state["batches"], dict(state["metrics"])


def _their_name(name: str) -> str:
    """Return the name that most modules give a metric: ``val_loss`` for ``eval_loss``, ``train_loss`` for ``loss``."""
    if name.startswith("eval_"):
        return f"val_{name.removeprefix('eval_')}"
    return "train_loss" if name == "loss" else name


class OnRanks(StandIn):
    """An object that knows its rank."""

    global_rank: int = reads(lambda self: collectives.rank())
    local_rank: int = reads(lambda self: collectives.local_rank())
    world_size: int = reads(lambda self: collectives.world_size())
    is_global_zero: bool = reads(lambda self: collectives.rank() == 0)


class Strategy(OnRanks):
    _stands_for = "trainer.strategy"

    def __init__(self, device: torch.device) -> None:
        self.root_device = device

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        collectives.all_reduce_max([0], name or "trainer.strategy.barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``. Collective."""
        return obj if not collectives.initialized() else collectives.gather(obj, "trainer.strategy.broadcast")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any. Collective."""
        (found,) = collectives.all_reduce_max([decision is not all], "trainer.strategy.reduce_boolean_decision")
        return bool(found) is not all

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return the mean, or sum, of a number over all ranks. Collective."""
        (total,) = collectives.sum_floats([float(tensor)], "trainer.strategy.reduce")
        return torch.tensor(total / (collectives.world_size() if reduce_op in ("mean", "avg") else 1))


class Logger(StandIn):
    """Stands in for ``trainer.logger``: what is logged is in dalsegno's records."""

    _stands_for = "trainer.logger"
    name = "dalsegno"
    version = 0

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self.save_dir = self.log_dir = self.root_dir = str(shared.context.args.directory)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the record of this step or evaluation. ``step`` is ignored."""
        self._shared.collected.add(numbers_of(metrics))

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Nothing: JsonLogger's header is the place for them."""

    def save(self) -> None:
        """Nothing: every record is written at once."""


class Trainer(OnRanks):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    _stands_for = "trainer"
    sanity_checking = testing = predicting = fast_dev_run = False
    datamodule = None
    min_epochs = min_steps = None
    num_nodes = 1

    def __init__(self, shared: SharedState) -> None:
        context = shared.context
        self._shared, self._context, self._state, self._args = shared, context, context.state, context.args
        self.model = context.model
        self.lightning_module = Module(shared, self)
        self.optimizers = [context.optimizer]
        self.strategy = Strategy(device_of(context.model))
        self.logger = Logger(shared)
        self.loggers = [self.logger]
        self.state = Values(  # texts, which equal Lightning's enumerations
            "trainer.state",
            {
                "fn": lambda: "validate" if shared.validating and not shared.fitting else "fit",
                "stage": lambda: "validate" if shared.validating else "train",
                "status": lambda: "running" if shared.fitting else "finished",
            },
        )
        steps = dict.fromkeys(("global_step", "_batches_that_stepped"), lambda: self.global_step)
        epoch_loop = Values("trainer.fit_loop.epoch_loop", {**steps, "batch_idx": lambda: shared.batches - 1})
        ends = {"max_epochs": lambda: self.max_epochs, "max_batches": lambda: self.num_training_batches}
        self.fit_loop = Values("trainer.fit_loop", ends, epoch_loop=epoch_loop)
        self.default_root_dir = self.log_dir = str(context.args.directory)
        self.precision = "bf16-mixed" if context.args.bf16 else "16-mixed" if context.args.fp16 else "32-true"
        # private, and LearningRateMonitor reads it
        self._logger_connector = Values(
            "trainer._logger_connector", {"should_update_logs": lambda: self._state.will_log}
        )
        schedulers = context.lr_scheduler
        always = {"name": None, "interval": "step", "frequency": 1, "reduce_on_plateau": False, "monitor": None}
        self.lr_scheduler_configs = [
            SimpleNamespace(scheduler=each, **always, strict=True)
            for each in (schedulers if isinstance(schedulers, (list, tuple)) else [schedulers])
            if each is not None
        ]

    # -- progress

    global_step: int = reads("_state.global_step")
    """Finished steps."""
    current_epoch: int = reads("_shared.epoch")
    max_steps: int = reads("_state.max_steps")
    estimated_stepping_batches: float = reads(lambda self: self.max_steps if self.max_steps > 0 else math.inf)
    max_epochs: int = reads(lambda self: -1 if self._args.max_steps > 0 else math.ceil(self._args.num_train_epochs))
    """-1 if ``max_steps`` ends the run."""
    accumulate_grad_batches: int = reads(lambda self: self._args.accumulation.at(self.global_step))
    """Of the next step. It cannot be set: ``gradient_accumulation_schedule`` changes it."""
    training: bool = reads(lambda self: not self.validating)
    validating: bool = reads("_shared.validating")
    ckpt_path: str | None = reads("_shared.resumed_from")
    """The checkpoint that this leg was resumed from."""

    # -- metrics

    callback_metrics: dict[str, Any] = reads("_shared.metrics")
    """The newest value of each metric, as tensors, under dalsegno's and Lightning's usual names."""

    logged_metrics = progress_bar_metrics = callback_metrics
    log_every_n_steps: int = reads(lambda self: int(self._args.logging.steps or 0))

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
    num_training_batches: float = reads(lambda self: _length(self.train_dataloader))
    enable_validation: bool = reads(lambda self: bool(self._args.evaluation) and self.val_dataloaders is not None)
    val_check_interval: float = reads(
        lambda self: int(self._args.evaluation.steps or 0) if self.enable_validation else 1.0
    )
    """Steps between evaluations; 0 where they are not scheduled in steps; 1.0, Lightning's default, without any."""
    check_val_every_n_epoch: int | None = reads(lambda self: None if self.enable_validation else 1)
    """None, so that callbacks act after evaluations; 1, Lightning's default, where there are none to wait for."""

    @property
    def val_dataloaders(self) -> Any:
        loaders = self._context.eval_dataloader
        return list(loaders.values()) if isinstance(loaders, Mapping) else loaders

    @property
    def num_val_batches(self) -> list[float]:
        loaders = self.val_dataloaders
        several = loaders if isinstance(loaders, list) else [] if loaders is None else [loaders]
        return [_length(loader) for loader in several]

    # -- ranks

    num_devices = OnRanks.world_size

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on this host's first rank."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    # -- parts

    callbacks: list[Any] = reads(lambda self: [inspect.unwrap(each) for each in self._context.trainer.callbacks])
    """Every callback; those of other libraries without their adapters."""
    early_stopping_callbacks: list[Any] = reads(
        lambda self: [each for each in self.callbacks if type(each).__name__ == "EarlyStopping"]
    )
    early_stopping_callback: Any = reads(lambda self: next(iter(self.early_stopping_callbacks), None))
    checkpoint_callbacks: list[Any] = reads(lambda self: [])
    """None: dalsegno saves by itself."""
    checkpoint_callback = None


def _length(loader: Any) -> float:
    batches = length_of(loader)
    return math.inf if batches is None else batches


class Module(StandIn):
    """Stands in for ``pl_module``: the model, with what a LightningModule adds to it.

    Every attribute of the model can be read, set and called through it.
    """

    _stands_for = "pl_module"
    _shared: SharedState
    _trainer: Trainer
    _model: Any
    automatic_optimization = True
    example_input_array = None
    trainer: Trainer = reads("_trainer")
    logger: Logger = reads("trainer.logger")
    current_epoch: int = reads("_shared.epoch")
    global_step: int = reads("trainer.global_step")
    global_rank: int = reads("trainer.global_rank")
    device: torch.device = reads(lambda self: device_of(self._model))

    def __init__(self, shared: SharedState, trainer: Trainer) -> None:
        vars(self).update(_shared=shared, _trainer=trainer, _model=shared.context.model)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._model, name):
            return getattr(self._model, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value) if hasattr(self._model, name) else object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def optimizers(self) -> Any:
        return self.trainer.optimizers[0]

    def lr_schedulers(self) -> Any:
        schedulers = [each.scheduler for each in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *,
        sync_dist: bool = False,
        **others: Any,
    ) -> None:
        """Add a number to the record of this step or evaluation, and to ``trainer.callback_metrics``.

        ``sync_dist=True``: the mean over the ranks; else a record has rank 0's number. ``on_epoch=True`` is refused in
        a step; other arguments are ignored.
        """
        self.log_dict({name: value}, on_epoch=on_epoch, sync_dist=sync_dist)

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *,
        sync_dist: bool = False,
        **others: Any,
    ) -> None:
        """:meth:`log` of several numbers."""
        if on_epoch and self._shared.in_step:
            names = ", ".join(dictionary)
            raise ConfigurationError(
                f"pl_module.log({names}, on_epoch=True) in a step: records have no means over an epoch; collect the "
                "numbers, and log their mean in on_train_epoch_end"
            )
        numbers = {name: float(value) for name, value in dictionary.items()}
        if sync_dist and collectives.initialized():
            sums = collectives.sum_floats(list(numbers.values()), "pl_module.log")
            numbers = {name: total / collectives.world_size() for name, total in zip(numbers, sums, strict=True)}
        self._shared.log(numbers)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.print(*args, **kwargs)


# --- the callbacks --------------------------------------------------------------------------------------------------


class Callback:
    """Base class with the methods of Lightning's that are called here. Override only those that are needed."""

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; two callbacks of one class need different ones."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None: ...
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...


ROWS = (
    Row(Event.BEFORE_LOAD, "setup", "stage", once="leg"),
    Row(Event.TRAIN_BEGIN, "setup", "stage", once="leg"),  # of a leg without a checkpoint, or a callback added since
    Row(Event.TRAIN_BEGIN, "on_fit_start"),
    Row(Event.TRAIN_BEGIN, "on_train_start"),
    Row(Event.EPOCH_BEGIN, "on_train_epoch_start"),
    Row(Event.MICROBATCH_BEGIN, "on_train_batch_start", "batch batch_idx"),
    Row(Event.BEFORE_FORWARD, "on_validation_batch_start", "batch val_batch_idx dataloader_idx", "validating"),
    Row(Event.BEFORE_BACKWARD, "on_before_backward", "loss"),
    Row(Event.AFTER_BACKWARD, "on_after_backward"),
    Row(Event.MICROBATCH_END, "on_train_batch_end", "outputs batch batch_idx", "more follow"),
    Row(Event.GRADIENTS_READY, "on_before_optimizer_step", "optimizer"),
    Row(Event.BEFORE_ZERO_GRAD, "on_before_zero_grad", "optimizer"),
    Row(Event.STEP_END, "on_train_batch_end", "outputs batch batch_idx"),
    Row(Event.EVALUATE_BEGIN, "on_validation_start", when="a validation begins"),
    Row(Event.EVALUATE_BEGIN, "on_validation_epoch_start", when="a validation begins"),
    Row(Event.PREDICTION_STEP, "on_validation_batch_end", "outputs batch val_batch_idx dataloader_idx"),
    Row(Event.LOG_STEP, "on_validation_epoch_end", when="the last set is logged"),  # what it logs is in that record
    Row(Event.EVALUATE, "on_validation_end", when="a validation ends"),
    Row(Event.EPOCH_END, "on_train_epoch_end"),
    Row(Event.EXCEPTION, "on_exception", "exception"),
    Row(Event.TRAIN_END, "on_train_end", when="the fit ends well"),
    Row(Event.TRAIN_END, "on_fit_end", when="the fit ends well"),
    Row(Event.TRAIN_END, "teardown", "stage"),
)

VALUES: Mapping[str, Callable[[Any, Any], Any]] = {
    "trainer": lambda shared, ctx: shared.trainer,
    "pl_module": lambda shared, ctx: shared.module,
    "stage": lambda shared, ctx: "fit",
    "batch": lambda shared, ctx: shared.batch,
    "outputs": lambda shared, ctx: _detached(shared.outputs),
    "batch_idx": lambda shared, ctx: shared.batches - 1,
    "val_batch_idx": lambda shared, ctx: shared.val_batch,
    "dataloader_idx": lambda shared, ctx: shared.set_index,
    "loss": lambda shared, ctx: ctx.outputs["loss"],
    "optimizer": lambda shared, ctx: ctx.optimizer,
    "exception": lambda shared, ctx: ctx.exception,
}


def _detached(outputs: Any) -> Any:
    """Return the outputs with their loss as Lightning passes it: without gradient."""
    return {**outputs, "loss": outputs["loss"].detach()} if "loss" in outputs else outputs


CONDITIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "validating": lambda shared, ctx: shared.validating,
    "a validation begins": lambda shared, ctx: shared.begins_validation,
    "the last set is logged": lambda shared, ctx: ctx.kind == "eval" and shared.is_last_set,
    "a validation ends": lambda shared, ctx: ctx.is_last,
    "more follow": lambda shared, ctx: not ctx.is_last,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
}

STATE_HOOKS = {"on_save_checkpoint": "checkpoint", "on_load_checkpoint": "checkpoint"}

_NEVER_RUN = ("sanity_check", "test", "test_epoch", "test_batch", "predict", "predict_epoch", "predict_batch")
"""Parts of the library's trainer that dalsegno does not have."""

_BY_THE_CLOCK = ("Timer",)
"""Callbacks of the library whose state each rank measures by its own clock."""


class Lightning(TableAdapter):
    """Adapts a ``Callback`` of Lightning."""

    dialect = "lightning"
    packages = ("lightning", "pytorch_lightning", "dalsegno.interop.lightning")
    bases = ("Callback",)
    silent = (*STATE_HOOKS, *(f"on_{what}_{end}" for what in _NEVER_RUN for end in ("start", "end")))
    rows = ROWS
    shared_kind = SharedState
    leading = ("trainer", "pl_module")
    values = VALUES
    conditions = CONDITIONS
    state_hooks = STATE_HOOKS
    instead = {
        "ModelCheckpoint": "set save_steps=, keep=Best(n) and metric_for_best_model=",
        "OnExceptionCheckpoint": "set save_steps=: a run resumes from its newest checkpoint",
        "StochasticWeightAveraging": "use dalsegno.callbacks.ModelMerge",
        "WeightAveraging": "use dalsegno.callbacks.EMA",
        "GradientAccumulationScheduler": "set gradient_accumulation_schedule=",
        "BaseFinetuning": "freeze parameters before they are passed to the Trainer",
        "ModelPruning": "prune the model before it is passed to the Trainer",
        "BatchSizeFinder": "search with Lightning's own Trainer",
        "LearningRateFinder": "search with Lightning's own Trainer",
        "ProgressBar": "use dalsegno.callbacks.ProgressCallback, which every run has",
        "ModelSummary": "use dalsegno.callbacks.CountParams",
        "DeviceStatsMonitor": "use dalsegno.callbacks.MemoryMonitor and GPUMonitor",
        "ThroughputMonitor": "use dalsegno.callbacks.RateProfiler",
        "SpikeDetection": "use dalsegno.callbacks.StabilityMonitor",
        "BasePredictionWriter": "write predictions in on_prediction_step of a dalsegno.Callback",
    }

    def __init__(self, foreign: object, name: str | None = None) -> None:
        super().__init__(foreign, name)
        self.state_rehearsed = not self._defines("on_save_checkpoint")  # which is called for real saves only
        if type(foreign).__name__ in _BY_THE_CLOCK and not hasattr(foreign, "state_compared"):
            self.state_compared = False

    @property
    def default_name(self) -> str:
        """``state_key`` of a class that defines it, which distinguishes callbacks of one class."""
        return str(self.method("state_key")) if self._defines("state_key") else super().default_name

    def _check_names(self) -> None:
        """Check all names, since ``setup`` and ``teardown`` do not begin with ``on_``."""
        super()._check_names()
        known = {row.method for row in self.rows} | set(self.silent)
        users = [cls for cls in type(self.__wrapped__).__mro__ if cls is not object and not self._is_theirs(cls)]
        own = {name for cls in users for name, value in vars(cls).items() if callable(value) and name[0] != "_"}
        for name in sorted(own - known):
            if difflib.get_close_matches(name, known, n=1, cutoff=0.9):
                raise UnknownName(f"handler in {type(self.__wrapped__).__name__}:", name, known)

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        has_state = ("state_dict", "load_state_dict", *STATE_HOOKS)
        return (self._save, self._load) if any(self._defines(method) for method in has_state) else None

    def _save(self) -> State:
        saved: dict[str, Any] = {"state": self.method("state_dict")() if self._defines("state_dict") else {}}
        if self._defines("on_save_checkpoint") and self._shared is not None:
            position = self._shared.position()
            checkpoint = dict(position)
            self.method("on_save_checkpoint")(self._shared.trainer, self._shared.module, checkpoint)
            saved["checkpoint"] = {name: value for name, value in checkpoint.items() if name not in position}
        return saved

    def _load(self, state: State) -> None:
        if self._defines("on_load_checkpoint") and self._shared is not None:
            checkpoint = {**self._shared.position(), **state.get("checkpoint", {})}
            self.method("on_load_checkpoint")(self._shared.trainer, self._shared.module, checkpoint)
        if self._defines("load_state_dict") and state["state"]:
            self.method("load_state_dict")(state["state"])
