"""The ``trainer`` of Cerebras's callbacks: the attributes that they use most; others raise an error."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dalsegno.data.loader import length_of
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events import contexts
from dalsegno.interop.stand_in import Progress, StandIn, Values, reads
from dalsegno.state import TrainerState
from dalsegno.system import filesystem

PACKAGES = ("cerebras", "dalsegno.interop.cerebras")
"""Packages that define base classes of callbacks."""


class SharedState(Progress):
    """Where a run is in Cerebras's order, shared by all callbacks of this dialect.

    In that order, a *fit* consists of stretches of training with validations between them. A stretch begins with its
    first step and ends before an evaluation, or with the run.
    """

    name = "cerebras"
    sets_control_flags = True  # by trainer.early_exit

    def __init__(self, context: contexts.Context) -> None:
        super().__init__(context)
        self.initial_step = 0
        """Finished steps when the fit began."""
        self.microbatch = 0
        """Index of the micro-batch in its step."""
        self.batch_idx = -1
        """Of the micro-batch in the current stretch of training."""
        self.is_counted = False
        """Whether the step whose micro-batches were the last is counted already."""
        self.is_last_step = False
        """Whether the stretch ends with the step in progress."""
        self.val_name: str | None = None
        """Of the evaluation set that is validated now; None in training."""
        self.loader: Any = None
        """Loader of that set."""
        self.training = False
        self.begins_stretch = False
        """Whether a stretch of training begins with this step."""
        self.ends_stretch = False
        """Whether a stretch ends at this event."""
        self.stretch = -1
        self.broken: set[str] = set()
        """Parts that an exception has ended: "validate", "train", "fit"."""
        self.model_call: tuple[list[Any], dict[str, Any]] = [], {}
        """Arguments with which the model is called next, while a method may change them."""
        self.trainer = Trainer(self)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        super().on_train_begin(ctx)
        self.initial_step, self.val_name, self.is_counted = ctx.state.global_step, None, False
        self.training, self.stretch, self.broken = False, -1, set()

    def on_step_begin(self, ctx: contexts.Context) -> None:
        super().on_step_begin(ctx)
        self.begins_stretch = not self.training
        if self.begins_stretch:
            self.training = True
            self.stretch += 1
            self.batch_idx = -1
        self.is_counted, self.val_name = False, None
        evaluates = ctx.state.will_evaluate and self.trainer.schedule.evaluates
        self.is_last_step = evaluates or ctx.state.global_step + 1 == ctx.state.max_steps

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        super().on_microbatch_begin(ctx)
        self.batch_idx += 1
        self.microbatch = ctx.index
        self.trainer.should_run_optimizer_step = False

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        super().on_microbatch_end(ctx)
        self.trainer.should_run_optimizer_step = ctx.is_last

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        super().on_step_end(ctx)
        self.is_counted = True
        if self.trainer.early_exit.should_exit:
            ctx.control.stop("a function of trainer.early_exit returned True", by="early_exit")

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        super().on_evaluate_begin(ctx)
        self.ends_stretch, self.training = self.training, False
        has_several = isinstance(ctx.eval_dataloader, dict)
        self.val_name = ctx.name if has_several else "validate"
        self.loader = ctx.eval_dataloader[ctx.name] if has_several else ctx.eval_dataloader

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        super().on_evaluate(ctx)
        self.val_name = None

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        now = {"validate": self.val_name is not None, "train": self.training, "fit": self.fitting}
        self.broken = {part for part, is_active in now.items() if is_active}
        self.training = False
        super().on_exception(ctx)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        super().on_train_end(ctx)
        self.ends_stretch, self.training, self.val_name = self.training, False, None
        self.trainer.early_exit.reset_exit_fns()


class Trainer(StandIn):
    """Stands in for ``trainer``. Callbacks may set further attributes on it."""

    _stands_for = "trainer"
    is_tracing = False
    global_step: int = reads("_state.global_step")
    batch_idx: int = reads("_shared.batch_idx")
    """Index of the micro-batch within this stretch of training."""
    summary_dir: Path = reads("artifact_dir")

    def __init__(self, shared: SharedState) -> None:
        context = shared.context
        self._shared, self._context, self._state = shared, context, context.state
        self.model: nn.Module = context.model
        self.optimizer: Optimizer = context.optimizer
        schedulers = context.lr_scheduler
        self.schedulers: list[Any] = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        self.logger = logging.getLogger("dalsegno")
        device = device_of(context.model)
        self.backend = Values(
            "trainer.backend",
            torch_device=device,
            device=device,
            is_cpu=device.type == "cpu",
            is_gpu=device.type != "cpu",
            is_csx=False,
            is_e2e_execution=True,
            is_tracing=False,
        )
        vars(self.backend).update(_impl=self.backend)
        self.schedule = Schedule(shared)
        self.loop = Loop(context, self.schedule)
        self.logging = Values(
            "trainer.logging",
            log_level="INFO",
            log_steps=context.args.logging.steps or None,
            enable_act_frequency=False,
            is_log_step=lambda trainer: trainer.is_log_step,
        )
        self.executor = Values(
            "trainer.executor",
            {
                "artifact_dir": lambda: self.artifact_dir,
                "on_first_iteration": lambda: self.is_first_iteration,
                "on_final_iteration": lambda: self.is_final_iteration,
                "user_iteration": lambda: self.schedule.batch_idx + 1,  # of the batch in progress in its stage, from 1
            },
        )
        steps = context.args.save_steps or None
        self.checkpoint = Values("trainer.checkpoint", steps=steps, disable_strict_checkpoint_loading=False)
        self.activation_steps = None
        self.validation_callbacks: list[Any] = []
        self._artifacts: Path | None = None
        self.early_exit = EarlyExit()
        self.model_dir: Path = context.args.directory
        self.precision = None
        self.should_run_optimizer_step = False
        """Whether the optimizer step follows this micro-batch."""
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
    def is_log_step(self) -> bool:
        """Whether this step is logged; in a validation, whether this batch is: each ``logging_steps``, and the last."""
        if self._shared.val_name is None:
            return self._state.will_log
        steps = self.logging.log_steps
        return self.is_final_iteration or bool(steps and self.executor.user_iteration % steps == 0)

    is_first_iteration: bool = reads(lambda self: self.schedule.batch_idx == 0)
    """Whether this is the first batch of the current stretch of training, or validation."""

    @property
    def is_final_iteration(self) -> bool:
        """Whether this is the last batch of the current stretch of training, or validation; False if not known."""
        shared = self._shared
        if shared.val_name is not None:
            return shared.val_batch + 1 == length_of(shared.loader)
        step = self._state.global_step - shared.is_counted
        is_last = self.should_run_optimizer_step or shared.microbatch + 1 >= self._context.args.accumulation.at(step)
        return is_last and shared.is_last_step

    @property
    def artifact_dir(self) -> Path:
        """A directory for this trainer's files, below ``cerebras_logs``."""
        if self._artifacts is None:
            name = f"{datetime.now():%Y%m%d_%H%M%S}"
            self._artifacts = filesystem.numbered(self.model_dir / "cerebras_logs", name)
            filesystem.make_directory(self._artifacts)
        return self._artifacts

    loggers: list[Any] = reads(lambda self: [each for each in self.all_callbacks if is_logger(each)])
    """Callbacks to which logged metrics are passed."""
    all_callbacks: Iterator[Any] = reads(lambda self: iter(self.callbacks.values()))

    @property
    def callbacks(self) -> OrderedDict[str, Any]:
        """Every callback by its key; those of other libraries without their adapters."""
        present = getattr(self._context.trainer, "callbacks", [])
        return OrderedDict((callback.key, inspect.unwrap(callback)) for callback in present)

    def save_checkpoint(self) -> None:
        """Request a checkpoint at the end of this step."""
        self._context.control.should_save = True

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
        scope = self.name_scope_path
        self._shared.collected.add({f"{scope}{name}": value for name, value in metrics.items()})

    @contextmanager
    def name_scope(self, name: str) -> Iterator[str]:
        """Prefix the names of metrics that are logged inside with ``name/``."""
        self._scopes.append(name)
        try:
            yield name
        finally:
            self._scopes.pop()

    name_scope_path: str = reads(lambda self: "".join(f"{name}/" for name in self._scopes))


def is_logger(callback: object) -> bool:
    """Whether a callback derives from the library's ``Logger``."""
    return any(
        cls.__name__ == "Logger" and cls.__module__.startswith(tuple(f"{package}." for package in PACKAGES))
        for cls in type(callback).__mro__
    )


class Loop(StandIn):
    """Stands in for ``trainer.loop``, the training loop, with its ``val_loop``."""

    _stands_for = "trainer.loop"
    num_trains: int = reads("_schedule.epochs")
    """Stretches of training in this fit."""
    train_steps: int | None = reads("_schedule.train_steps")
    """Steps of the current stretch."""
    total_steps: int = reads("_state.max_steps")
    """-1 where the data's length is unknown."""

    def __init__(self, context: contexts.Context, schedule: Schedule) -> None:
        args, self._state = context.args, context.state
        self._schedule = schedule
        self._accumulation = args.accumulation
        self.num_steps = None
        self.max_steps = args.max_steps if args.max_steps > 0 else None
        self.num_epochs = None if args.max_steps > 0 else args.num_train_epochs
        self.eval_frequency = args.evaluation.steps or None
        self.train_only = not args.evaluation
        hooks = ("start", "end", "step_start", "step_end", "batch_start", "batch_end")
        self.val_loop = Values(  # which always covers the whole set
            "loop",
            {"eval_steps": lambda: schedule.current_stage.steps},
            **{f"on_{moment}_hook": f"on_validate_{moment}" for moment in hooks},
        )

    grad_accum_steps: int = reads(lambda self: self._accumulation.at(self._state.global_step))
    """Of the next step."""


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


@dataclass(frozen=True)
class StageType:
    """Equal to the library's own member of this name."""

    name: str

    def __eq__(self, other: object) -> bool:
        return getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)


TRAINING, VALIDATION = StageType("TRAIN_DATALOADER"), StageType("VAL_DATALOADER")


@dataclass(frozen=True)
class Stage:
    """A stretch of training, whose ``steps`` are optimizer steps, or a validation, whose ``steps`` are batches."""

    type: StageType
    start_step: int
    """Finished optimizer steps when it begins."""
    name: str
    steps: int | None
    """None where the length of the data is unknown."""
    every_n_vals: int | None = None


class Schedule(StandIn):
    """Stands in for ``trainer.schedule``, from ``max_steps`` and ``eval_steps``."""

    _stands_for = "trainer.schedule"
    checkpoint_schedule = None
    """dalsegno saves at steps that a trigger decides on, so none is known ahead."""
    checkpoint_steps = None
    initial_global_step: int = reads("_shared.initial_step")
    train_steps: int | None = reads("current_stage.steps")
    """Steps of the current stretch of training."""
    evaluates: bool = reads(lambda self: bool(self._args.evaluation) and bool(self._sets))
    """Whether evaluations are scheduled."""
    stages: list[Stage] = reads(lambda self: list(self._stages(self._shared.initial_step)))
    """All stages of the fit."""
    epochs: int = reads(lambda self: sum(stage.type == TRAINING for stage in self.stages))
    """Stretches of training in this fit."""
    epochs_remaining: int = reads(
        lambda self: sum(stage.type == TRAINING for stage in [self.current_stage, *self.stages_remaining])
    )

    def __init__(self, shared: SharedState) -> None:
        self._shared, self._state, self._args = shared, shared.context.state, shared.context.args
        loaders = shared.context.eval_dataloader
        self._sets: dict[str, Any] = dict(loaders) if isinstance(loaders, Mapping) else {"validate": loaders}
        if loaders is None:
            self._sets = {}

    @property
    def batch_idx(self) -> int:
        """Index of the batch in progress, in the current stage."""
        shared = self._shared
        return shared.batch_idx if shared.val_name is None else shared.val_batch

    def _stages(self, start: int) -> Iterator[Stage]:
        total, period = self._state.max_steps, self._args.evaluation.steps if self.evaluates else 0
        if total < 0:
            yield Stage(TRAINING, start, "train", None)
            return
        while start < total:
            end = min(total, (start // period + 1) * period) if period else total
            yield Stage(TRAINING, start, "train", end - start)
            if period and end % period == 0:
                for name, loader in self._sets.items():
                    yield Stage(VALIDATION, end, name, length_of(loader))
            start = end

    @property
    def current_stage(self) -> Stage:
        shared, step = self._shared, self._state.global_step
        if shared.val_name is not None:
            return Stage(VALIDATION, step, shared.val_name, length_of(shared.loader))
        step -= shared.is_counted
        stages = [stage for stage in self.stages if stage.type == TRAINING and stage.start_step <= step]
        return stages[-1] if stages else Stage(TRAINING, step, "train", 0)

    @property
    def stages_remaining(self) -> list[Stage]:
        """Those after the current one."""
        now = self.current_stage
        later = [stage for stage in self.stages if stage.start_step > now.start_step]
        if now.type == TRAINING:
            return later
        names = list(self._sets)
        after = names[names.index(now.name) + 1 :] if now.name in names else []
        same = [Stage(VALIDATION, now.start_step, name, length_of(self._sets[name])) for name in after]
        rest = [stage for stage in self.stages if stage.type == TRAINING and stage.start_step == now.start_step]
        return [*same, *rest, *later]

    @property
    def batches_remaining(self) -> int:
        """Batches after this one in the current stage; in training, of full steps."""
        stage = self.current_stage
        if stage.steps is None:
            raise AttributeError("trainer.schedule.batches_remaining: the length of the data is unknown; set max_steps")
        if stage.type == VALIDATION:
            return stage.steps - self.batch_idx - 1
        accumulation = self._args.accumulation.at(stage.start_step)
        return max(0, stage.steps * accumulation - self.batch_idx - 1)
