"""InstructLab's dialect: observers that get one ``TrainingContext`` and run in the background.

Each callback has a separate thread, so a slow one delays neither the training nor another callback. The run waits up to
10 seconds for ``on_train_end``. What a callback raises is logged and counted; training continues. A callback with
``state_dict`` and ``load_state_dict`` is called synchronously, on the training thread, so that a checkpoint has its
state after the step.

In addition to the thirteen methods of InstructLab's class, those of its first proposal are called.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from dalsegno.args import TrainingArguments
from dalsegno.data.build import IGNORED_LABEL
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events import contexts
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder, Callback, Construction
from dalsegno.events.table import Event
from dalsegno.interop.stand_in import reads
from dalsegno.state import Handler
from dalsegno.stateful.component import Stateful
from dalsegno.system.worker import Counts, Worker

__all__ = ["DIALECT", "BatchMetrics", "InstructLab", "TrainerCallback", "TrainingContext"]


class BatchMetrics(dict[str, Any]):
    """The seven numbers of a step's batch, by key, and as attributes; empty, and None, before the update.

    - ``total_samples`` of this step, on all ranks
    - ``total_length``: tokens of this step, on all ranks; on several ranks known only if the callback has
      ``on_step_end``, and from then on
    - ``num_loss_counted_tokens``: labels other than -100, on all ranks; on several ranks known as ``total_length`` is
    - ``accumulated_loss``: the loss summed over those; known if the callback has ``on_step_end``
    - ``accumulated_aux_loss``: always None; it is in the loss
    - ``grad_accum_steps``, ``num_minibatches``: micro-batches of this step, on each rank
    """

    _KEYS = (
        *("total_samples", "total_length", "num_loss_counted_tokens", "accumulated_loss", "accumulated_aux_loss"),
        *("grad_accum_steps", "num_minibatches"),
    )

    def __getattr__(self, name: str) -> Any:
        if name not in self._KEYS:
            raise AttributeError(f"batch_metrics.{name}: unknown; available: {', '.join(self._KEYS)}")
        return self.get(name)


@dataclass
class TrainingContext:
    """A snapshot, separate for each callback. A value not yet known in this step is None, never an older one.

    All numbers are equal on all ranks: those that differ between ranks are known from ``on_step_end`` on, and only if
    the callback has that method, which costs an exchange per step.
    """

    hook_name: str = ""
    step: int = 0
    """Counted from 1; the same from ``on_step_begin`` to ``on_step_end``."""
    epoch: int = 0
    """From 0."""
    total_samples: int = 0
    """Samples trained on so far, on all ranks."""
    total_tokens: int | None = None
    """Tokens trained on so far, on all ranks; on several ranks, known only at records."""

    loss: float | None = None
    """Mean over this step's samples; the logged loss in ``on_log``, and if no callback has ``on_step_end``."""
    learning_rate: float | None = None
    """Learning rate of the next step: read after the scheduler's step."""
    grad_norm: float | None = None
    """Total L2 norm before clipping."""
    elapsed_time: float | None = None
    """Seconds that this step took, on the slowest rank."""
    overall_throughput: float | None = None
    """Samples per second on all ranks: of this step; in ``on_log`` on several ranks, of the steps since the last
    record."""
    cuda_mem_allocated: float | None = None
    """GiB, on the rank with most; None without an accelerator."""

    batch_metrics: BatchMetrics = field(default_factory=BatchMetrics)
    """Known after the update."""
    val_metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of this step's evaluations; the last one's loss also as ``val_loss``, and its labels other than -100, on
    all ranks, as ``val_num_tokens`` if its batches have labels."""
    checkpoint_path: str | None = None
    """Path of this step's checkpoint, known from ``on_save`` on."""

    output_dir: str = ""
    model_name_or_path: str = ""
    """``config.name_or_path`` of a Hugging Face model."""
    max_epochs: int = 0
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclass
class FunctionContext(TrainingContext):
    """The context of functions, with the names of InstructLab's first proposal in addition."""

    args: TrainingArguments | None = None
    """The run's settings."""

    @classmethod
    def of(cls, context: TrainingContext, args: TrainingArguments) -> FunctionContext:
        return cls(**{each.name: getattr(context, each.name) for each in fields(TrainingContext)}, args=args)

    global_step: ClassVar[int] = reads("step")
    samples_seen: ClassVar[int] = reads("total_samples")
    avg_loss_across_ranks: ClassVar[float | None] = reads("loss")
    current_lr: ClassVar[float | None] = reads("learning_rate")
    global_grad_norm: ClassVar[float | None] = reads("grad_norm")
    is_main_process: ClassVar[bool] = reads("is_world_process_zero")


class TrainerCallback:
    """Base class with InstructLab's methods. Override only those that are needed; each may be async."""

    def on_train_begin(self, context: TrainingContext) -> Any: ...
    def on_epoch_begin(self, context: TrainingContext) -> Any: ...
    def on_step_begin(self, context: TrainingContext) -> Any: ...
    def on_before_forward(self, context: TrainingContext) -> Any: ...
    def on_after_forward(self, context: TrainingContext) -> Any: ...
    def on_before_backward(self, context: TrainingContext) -> Any: ...
    def on_after_backward(self, context: TrainingContext) -> Any: ...
    def on_before_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_pre_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_after_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_optimizer_step(self, context: TrainingContext) -> Any: ...
    def on_log(self, context: TrainingContext) -> Any: ...
    def on_evaluate(self, context: TrainingContext) -> Any: ...
    def on_save(self, context: TrainingContext) -> Any: ...
    def on_step_end(self, context: TrainingContext) -> Any: ...
    def on_epoch_end(self, context: TrainingContext) -> Any: ...
    def on_train_end(self, context: TrainingContext) -> Any: ...


_BY_CLOCK = ("_runtime", "_per_second")
"""Endings of metrics that each rank measures by its own clock."""


class SharedState(Callback):
    """Handles each event before InstructLab's callbacks do, so that their contexts contain its values."""

    name = "instructlab"
    sets_control_flags = False

    def __init__(self, context: contexts.Context) -> None:
        args, model = context.args, context.model
        self.args = args
        self._state = context.state
        self._alone = collectives.world_size() == 1
        self._layout = context.layout
        self._device = device_of(model)
        self._always: dict[str, Any] = {
            "output_dir": str(args.directory),
            "model_name_or_path": str(getattr(getattr(model, "config", None), "name_or_path", None) or ""),
            "max_epochs": math.ceil(args.num_train_epochs),
            "world_size": collectives.world_size(),
            "is_local_process_zero": context.state.is_local_process_zero,
            "is_world_process_zero": context.state.is_world_process_zero,
        }
        self._epoch = 0
        self.in_update = False
        """Whether the run is between a step's begin and its update, where forward passes are for training."""
        self._tokens_agreed = False
        self._of_step: dict[str, Any] = {}
        self._of_record: dict[str, Any] = {}
        self._batch_metrics: dict[str, Any] = {}
        self._val_metrics: dict[str, Any] = {}
        self._checkpoint: str | None = None
        self._captured = TrainingContext()
        self._began = 0.0
        self._seconds = 0.0  # of the step, on this rank
        self._memory: float | None = None  # GiB of this step, over all ranks
        self._samples_before = 0
        self._logged = 0.0, 0  # seconds of training and samples at the last record
        self._throughput = 0.0
        self._minibatches = 0
        self._length: int | None = None
        self._counted_tokens: torch.Tensor | None = None
        self._evaluated_tokens: torch.Tensor | None = None  # of the evaluation, on this rank
        self._val_num_tokens: int | None = None  # of the newest evaluation, on all ranks

    def context(self, hook_name: str) -> TrainingContext:
        """Return a snapshot of all that is known."""
        state = self._state
        self._of_step, self._batch_metrics = _read(self._of_step), _read(self._batch_metrics)
        return TrainingContext(
            hook_name=hook_name,
            step=state.global_step + self.in_update,
            epoch=self._epoch,
            total_samples=state.samples_seen,
            total_tokens=state.num_input_tokens_seen if self._alone or self._tokens_agreed else None,
            **(self._of_step | self._of_record if hook_name == "on_log" else self._of_record | self._of_step),
            batch_metrics=BatchMetrics(self._batch_metrics),
            val_metrics=dict(self._val_metrics),
            checkpoint_path=self._checkpoint,
            cuda_mem_allocated=self._allocated() if self._alone else self._memory,
            **self._always,
        )

    def learn(self, metrics: dict[str, Any]) -> None:
        """Store the metrics of this step, already reduced over all ranks, and reduce what only this dialect has.
        Collective."""
        self._of_step |= _with_a_field(metrics)
        batch = self._batch_metrics
        batch["total_length"] = metrics.get("tokens")
        counted = -1.0 if self._counted_tokens is None else float(self._counted_tokens)
        allocated = self._allocated()
        here = [self._seconds, -1.0 if allocated is None else allocated, counted]
        by_rank = collectives.gather_floats(here, "InstructLab's numbers of a step")
        seconds, memories, counts = zip(*by_rank, strict=True)
        self._of_step["elapsed_time"] = max(seconds)
        self._of_step["overall_throughput"] = batch["total_samples"] / max(seconds)
        self._memory = max(memories) if max(memories) >= 0 else None
        if max(counts) >= 0:
            batch["num_loss_counted_tokens"] = int(sum(each for each in self._layout.of_data_ranks(counts) if each > 0))
            batch["accumulated_loss"] = metrics["loss"] * batch["num_loss_counted_tokens"]

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._epoch = int(ctx.state.epoch)
        self._logged = ctx.state.elapsed(), ctx.state.samples_seen
        self._reset()
        self._captured = self.context("on_save")  # of the checkpoint that the leg resumes from

    def on_epoch_begin(self, ctx: contexts.EpochContext) -> None:
        self._epoch = ctx.epoch
        self._reset()

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self._reset()
        self._minibatches, self._length, self._counted_tokens = 0, None, None
        self.in_update = True
        self._began, self._samples_before = time.monotonic(), ctx.state.samples_seen

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        self._minibatches += 1
        if not ctx.samples or not isinstance(ctx.batch, Mapping):
            return
        if isinstance(tokens := ctx.batch.get("input_ids"), torch.Tensor):
            self._length = (self._length or 0) + tokens.numel()
        self._counted_tokens = _with_labels(self._counted_tokens, ctx.batch, ctx.samples)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        self.in_update = False
        samples = ctx.samples_seen - self._samples_before
        lr = ctx.optimizer.param_groups[0]["lr"]
        self._of_step["learning_rate"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
        self._seconds = time.monotonic() - self._began
        if self._alone:
            self._of_step |= {"elapsed_time": self._seconds, "overall_throughput": samples / self._seconds}
        self._batch_metrics = {
            "total_samples": samples,
            "total_length": self._length if self._alone else None,
            "num_loss_counted_tokens": self._counted_tokens if self._alone else None,
            "accumulated_loss": None,
            "accumulated_aux_loss": None,
            "grad_accum_steps": self._minibatches,
            "num_minibatches": self._minibatches,
        }

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._evaluated_tokens = None

    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> None:
        self._evaluated_tokens = _with_labels(self._evaluated_tokens, ctx.batch, ctx.samples)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        """On several ranks, measure the throughput by the slowest rank's clock, and sum up the tokens of an evaluation.
        Collective."""
        if ctx.kind == "eval":
            here = -1.0 if self._evaluated_tokens is None else float(self._evaluated_tokens)
            by_rank = [count for (count,) in collectives.gather_floats([here], "val_num_tokens") if count >= 0]
            self._val_num_tokens = int(sum(by_rank)) if by_rank else None
        if ctx.kind != "train" or self._alone:
            return
        now, samples = ctx.state.elapsed(), ctx.state.samples_seen
        seconds = max(each for (each,) in collectives.gather_floats([now - self._logged[0]], "overall_throughput"))
        self._throughput = (samples - self._logged[1]) / seconds
        self._logged = now, samples

    def on_log(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            self._of_record = _with_a_field(ctx.logs)
            if not self._alone:
                self._of_record["overall_throughput"] = self._throughput
            self._tokens_agreed = True

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        metrics = {name: value for name, value in ctx.metrics.items() if self._alone or not name.endswith(_BY_CLOCK)}
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        self._val_metrics |= {**metrics, **({"val_loss": losses[0]} if losses else {})}
        if self._val_num_tokens is not None:
            self._val_metrics["val_num_tokens"] = self._val_num_tokens

    def on_before_save(self, ctx: contexts.BeforeSaveContext) -> None:
        self._captured = self.context("on_save")

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if ctx.state is self._state:  # the checkpoint of this step
            self._checkpoint = str(ctx.path)

    def saved_context(self, ctx: contexts.SaveContext) -> TrainingContext:
        """Return a snapshot as of the checkpoint: further steps may have finished since."""
        return copy.deepcopy(replace(self._captured, checkpoint_path=str(ctx.path)))

    def on_epoch_end(self, ctx: contexts.EpochContext) -> None:
        self._epoch = ctx.epoch

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        self._reset()

    def _reset(self) -> None:
        self.in_update = self._tokens_agreed = False
        self._of_step, self._of_record, self._batch_metrics, self._val_metrics = {}, {}, {}, {}
        self._checkpoint = self._memory = None

    def _allocated(self) -> float | None:
        """GiB on this rank's device; None without an accelerator."""
        allocated = accelerator.memory_allocated(self._device)
        return None if allocated is None else allocated / 2**30


class StepNumbers(Callback):
    """Fetches the numbers of each step over all ranks, where a callback has ``on_step_end``, on whichever rank."""

    name = "instructlab steps"
    sets_control_flags = False

    def __init__(self, context: contexts.Context) -> None:
        self._shared: SharedState

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._shared = binder.shared(SharedState)
        return super().bound_handlers(binder)

    def on_train_metrics(self, ctx: contexts.MetricsContext) -> None:
        self._shared.learn(ctx.metrics)


def _with_a_field(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that the context has a field for."""
    return {name: float(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as numbers: they wait on their device until a callback is called."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _with_labels(count: torch.Tensor | None, batch: Any, samples: int) -> torch.Tensor | None:
    """Add the labels of a batch's true samples that the loss counts; None where no batch has had labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return count
    counted = (labels[:samples] != IGNORED_LABEL).sum()
    return counted if count is None else count + counted


CLOSE_TIMEOUT = 10.0
"""Seconds for which the end of training waits for a callback."""


class InstructLab(CallbackAdapter):
    """Adapts a ``TrainerCallback`` of InstructLab."""

    dialect = "instructlab"
    packages = ("instructlab", "dalsegno.interop.instructlab")
    bases = ("TrainerCallback",)
    calls = (
        (Event.TRAIN_BEGIN, "on_train_begin"),
        (Event.EPOCH_BEGIN, "on_epoch_begin"),
        (Event.STEP_BEGIN, "on_step_begin"),
        (Event.BEFORE_FORWARD, "on_before_forward"),
        (Event.AFTER_FORWARD, "on_after_forward"),
        (Event.BEFORE_BACKWARD, "on_before_backward"),
        (Event.AFTER_BACKWARD, "on_after_backward"),
        (Event.GRADIENTS_READY, "on_before_optimizer_step"),
        (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"),
        (Event.STEP_END, "on_after_optimizer_step"),
        (Event.STEP_END, "on_optimizer_step"),  # the schedule has moved, gradients are cleared
        (Event.TRAIN_METRICS, "on_step_end"),  # where the loss over all ranks is known
        (Event.LOG, "on_log"),
        (Event.EVALUATE, "on_evaluate"),
        (Event.SAVE, "on_save"),
        (Event.STEP_DONE, "on_step_end"),
        (Event.EPOCH_END, "on_epoch_end"),
        (Event.TRAIN_END, "on_train_end"),
    )
    sets_control_flags = False

    def __init__(self, foreign: object, name: str | None = None) -> None:
        super().__init__(foreign, name)
        self._worker = Worker(f"{self.key}, in the background")

    @property
    def counts(self) -> Counts:
        """Numbers of calls that ran, failed, and were dropped."""
        return self._worker.counts

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("context",), ()

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys([*super().handled_events(), Event.TRAIN_END]))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [*super().bound_handlers(binder), (Event.TRAIN_END, self._finish)]

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, function = binder.shared(SharedState), getattr(self.__wrapped__, method)
        run = self._worker.do if isinstance(self.__wrapped__, Stateful) else self._worker.submit

        conditions: dict[Event, Callable[[Any], bool]] = {
            Event.BEFORE_FORWARD: lambda ctx: shared.in_update,
            Event.AFTER_FORWARD: lambda ctx: shared.in_update,
            Event.LOG: lambda ctx: ctx.kind == "train",
        }
        is_due = conditions.get(event, lambda ctx: True)

        def call(_: Any, ctx: Any) -> None:
            if is_due(ctx):
                context = shared.saved_context(ctx) if event is Event.SAVE else shared.context(method)
                run(partial(function, self.converted(context, shared)), method)

        if event is Event.TRAIN_METRICS:
            binder.shared(StepNumbers)
            return lambda _, ctx: None
        return call

    def converted(self, context: TrainingContext, shared: SharedState) -> TrainingContext:
        """Return the context in the form in which the methods get it."""
        return context

    def _finish(self, ctx: Any) -> None:
        self._worker.close(CLOSE_TIMEOUT)
        self._worker.report()


Function = Callable[..., Any]
"""``f(context, **kwargs)``; may be async."""

EVENTS = tuple(dict.fromkeys(method for _, method in InstructLab.calls))

_ALIASES = {"on_checkpoint": "on_save", "on_validation_loss": "on_evaluate"}

_EVENT_ARGUMENTS: dict[str, Callable[[TrainingContext], dict[str, Any]]] = {
    "on_save": lambda context: {"checkpoint_path": context.checkpoint_path},
    "on_evaluate": lambda context: {"validation_loss": context.val_metrics.get("val_loss")},
    "on_log": lambda context: {"loss": context.loss},
}


def functions(*, name: str | None = None, **on: Function | Sequence[Function]) -> Callback:
    """Call functions at events: ``functions(on_save=run_eval, on_evaluate=[first, second])``.

    Each function is called as ``f(context, **kwargs)`` with a ``FunctionContext``. If it has a parameter of that name,
    or takes ``**kwargs``, it also gets ``checkpoint_path`` (on_save), ``validation_loss`` (on_evaluate) or ``loss``
    (on_log). Each runs on rank 0 only, on a separate thread. What it raises is logged and counted; training continues.

    Args:
        name: the callback's key; two callbacks of one run need different ones. None: made of the functions' names.
        on: one or several functions for each event: ``on_train_begin``, ``on_epoch_begin``, ``on_step_begin``,
            ``on_before_forward``, ``on_after_forward``, ``on_before_backward``, ``on_after_backward``,
            ``on_before_optimizer_step``, ``on_pre_optimizer_step``, ``on_after_optimizer_step``,
            ``on_optimizer_step``, ``on_log``, ``on_evaluate``, ``on_save``, ``on_step_end``, ``on_epoch_end``,
            ``on_train_end``.

    Raises:
        UnknownName: for an unknown event; the message names the nearest.
        ConfigurationError: for something that cannot be called with these arguments.
    """
    for event in on:
        if event not in EVENTS:
            raise UnknownName("event", event, EVENTS, _ALIASES)
    given: list[tuple[str, Any]] = [
        (event, each if isinstance(each, list | tuple) else [each]) for event, each in on.items()
    ]
    observers = [_observer(event, function) for event, several in given for function in several]
    made = Functions(observers, name)
    made.construction = Construction(functions, (), {"name": name, **on})
    return made


class FunctionObserver(InstructLab):
    """Calls one function at one event."""

    def converted(self, context: TrainingContext, shared: SharedState) -> TrainingContext:
        return FunctionContext.of(context, shared.args)


class Functions(Callback):
    """Several functions, each in the background."""

    sets_control_flags = False
    background_safe = False
    ranks = "zero"

    def __init__(self, observers: Sequence[InstructLab], name: str | None) -> None:
        self._observers = observers
        self.name = name or f"functions({', '.join(observer.key for observer in observers)})"

    @property
    def counts(self) -> dict[str, Counts]:
        """For each function, the numbers of calls that ran, failed, and were dropped."""
        return {observer.key: observer.counts for observer in self._observers}

    def handled_events(self) -> list[Event]:
        return list(dict.fromkeys(event for observer in self._observers for event in observer.handled_events()))

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        return [each for observer in self._observers for each in observer.bound_handlers(binder)]


def _observer(event: str, function: Function) -> InstructLab:
    if not callable(function):
        raise ConfigurationError(f"functions({event}={function!r}): needs a function, or a list of functions")
    added: Callable[[TrainingContext], dict[str, Any]] = _EVENT_ARGUMENTS.get(event, lambda context: {})
    accepted = _accepted(event, function, list(added(FunctionContext())))

    def call(context: TrainingContext) -> Any:
        return function(context, **{name: value for name, value in added(context).items() if name in accepted})

    name = getattr(function, "__name__", type(function).__name__)
    return FunctionObserver(SimpleNamespace(**{"name": name, event: call}))


def _accepted(event: str, function: Function, added: list[str]) -> list[str]:
    """Return those of the event's arguments that the function takes."""
    signature = inspect.signature(function)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    accepted = [name for name in added if takes_all or name in signature.parameters]
    try:
        signature.bind(FunctionContext(), **dict.fromkeys(accepted))
    except TypeError as error:
        given = ", ".join(["context", *(f"{name}=" for name in added)])
        raise ConfigurationError(
            f"functions({event}={getattr(function, '__name__', function)}): cannot be called with ({given}): {error}"
        ) from error
    return accepted


DIALECT = InstructLab
