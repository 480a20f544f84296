"""Observers: callbacks of InstructLab and its siblings, which get one context and run in the background.

Each callback has a separate thread, so a slow one delays neither the training nor another callback. The run waits up to
10 seconds for ``on_train_end``. What a callback raises is logged and counted; training continues. A callback with
``state_dict`` and ``load_state_dict`` is called synchronously, on the training thread, so that a checkpoint has its
state after the step.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from dalsegno.data.build import IGNORED_LABEL
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events import contexts
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder, Callback
from dalsegno.events.table import Event
from dalsegno.state import Handler
from dalsegno.stateful.component import Stateful
from dalsegno.system.worker import Counts, Worker

T = TypeVar("T")

_BY_CLOCK = ("_runtime", "_per_second")
"""Endings of metrics that each rank measures by its own clock."""


class SharedState(Callback):
    """Handles each event before the observers do, so that their contexts contain its values."""

    name = "observers"
    sets_control_flags = False

    def __init__(self, context: contexts.Context) -> None:
        args, model = context.args, context.model
        self.args, self.control = args, context.control
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
        self._epoch = self._epochs_done = 0
        self.in_update = False
        """Whether the run is between a step's begin and its update, where forward passes are for training."""
        self._tokens_agreed = False
        self._of_step: dict[str, Any] = {}
        self._of_record: dict[str, Any] = {}
        self._batch_metrics: dict[str, Any] = {}
        self._val_metrics: dict[str, Any] = {}
        self._checkpoint: str | None = None
        self._captured: dict[str, Any] = {}
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

    def known(self, hook_name: str) -> dict[str, Any]:
        """Return all that is known, by InstructLab's names, which its ``TrainingContext`` explains; besides them

        - ``steps_done``, ``epochs_done``: those that have ended
        - ``step_learning_rate``: that of the step's own update, once the step has begun
        """
        state = self._state
        self._of_step, self._batch_metrics = _read(self._of_step), _read(self._batch_metrics)
        return {
            "hook_name": hook_name,
            "step": state.global_step + self.in_update,
            "steps_done": state.global_step,
            "epoch": self._epoch,
            "epochs_done": self._epochs_done,
            "total_samples": state.samples_seen,
            "total_tokens": state.num_input_tokens_seen if self._alone or self._tokens_agreed else None,
            **(self._of_step | self._of_record if hook_name == "on_log" else self._of_record | self._of_step),
            "batch_metrics": dict(self._batch_metrics),
            "val_metrics": dict(self._val_metrics),
            "checkpoint_path": self._checkpoint,
            "cuda_mem_allocated": self._allocated() if self._alone else self._memory,
            **self._always,
        }

    def known_of_checkpoint(self, ctx: contexts.SaveContext) -> dict[str, Any]:
        """Return what was known at the checkpoint: further steps may have finished since."""
        known, copied = self._captured, ("batch_metrics", "val_metrics")
        return {**known, **{name: dict(known[name]) for name in copied}, "checkpoint_path": str(ctx.path)}

    def learn(self, metrics: dict[str, Any]) -> None:
        """Of this step, reduced over all ranks; reduce what only observers have. Collective."""
        self._of_step |= _with_a_field(metrics)
        batch = self._batch_metrics
        batch["total_length"] = metrics.get("tokens")
        counted = -1.0 if self._counted_tokens is None else float(self._counted_tokens)
        allocated = self._allocated()
        here = [self._seconds, -1.0 if allocated is None else allocated, counted]
        by_rank = collectives.gather_floats(here, "the observers' numbers of a step")
        seconds, memories, counts = zip(*by_rank, strict=True)
        self._of_step["elapsed_time"] = max(seconds)
        self._of_step["overall_throughput"] = batch["total_samples"] / max(seconds)
        self._memory = max(memories) if max(memories) >= 0 else None
        if max(counts) >= 0:
            batch["num_loss_counted_tokens"] = int(sum(each for each in self._layout.of_data_ranks(counts) if each > 0))
            batch["accumulated_loss"] = metrics["loss"] * batch["num_loss_counted_tokens"]

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._epoch = self._epochs_done = int(ctx.state.epoch)
        self._logged = ctx.state.elapsed(), ctx.state.samples_seen
        self._reset()
        self._captured = self.known("on_save")  # of the checkpoint that the leg resumes from

    def on_epoch_begin(self, ctx: contexts.EpochContext) -> None:
        self._epoch = self._epochs_done = ctx.epoch
        self._reset()

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self._reset()
        self._minibatches, self._length, self._counted_tokens = 0, None, None
        self.in_update = True
        self._of_step["step_learning_rate"] = _learning_rate(ctx)
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
        self._of_step["learning_rate"] = _learning_rate(ctx)
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
        self._captured = self.known("on_save")

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if ctx.state is self._state:  # the checkpoint of this step
            self._checkpoint = str(ctx.path)

    def on_epoch_end(self, ctx: contexts.EpochContext) -> None:
        self._epoch, self._epochs_done = ctx.epoch, ctx.epoch + 1

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

    name = "observers' steps"
    sets_control_flags = False

    def __init__(self, context: contexts.Context) -> None:
        self._shared: SharedState

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._shared = binder.shared(SharedState)
        return super().bound_handlers(binder)

    def on_train_metrics(self, ctx: contexts.MetricsContext) -> None:
        self._shared.learn(ctx.metrics)


def _with_a_field(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: float(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}


def _learning_rate(ctx: contexts.Context) -> float | torch.Tensor:
    lr: float | torch.Tensor = ctx.optimizer.param_groups[0]["lr"]
    return lr.clone() if isinstance(lr, torch.Tensor) else lr


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


class Observer(CallbackAdapter):
    """Adapts a callback whose methods get one context."""

    bases = ("TrainerCallback",)
    calls: ClassVar[Sequence[tuple[Event, str]]] = (
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

    def unsaved_attributes(self) -> dict[str, Any]:
        return super().unsaved_attributes() if self.sets_control_flags else {}  # another thread may be changing them

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

    @abstractmethod
    def context(self, known: dict[str, Any], shared: SharedState) -> Any:
        """The library's, of what is known."""

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared, function = binder.shared(SharedState), getattr(self.__wrapped__, method)
        at_once = self.sets_control_flags or isinstance(self, Stateful)
        run = self._worker.do if at_once else self._worker.submit

        conditions: dict[Event, Callable[[Any], bool]] = {
            Event.BEFORE_FORWARD: lambda ctx: shared.in_update,
            Event.AFTER_FORWARD: lambda ctx: shared.in_update,
            Event.LOG: lambda ctx: ctx.kind == "train",
        }
        is_due = conditions.get(event, lambda ctx: True)

        def call(_: Any, ctx: Any) -> None:
            if is_due(ctx):
                known = shared.known_of_checkpoint(ctx) if event is Event.SAVE else shared.known(method)
                run(partial(function, self.context(known, shared)), method)

        if event is Event.TRAIN_METRICS:
            binder.shared(StepNumbers)
            if (Event.STEP_DONE, method) in self.calls:
                return lambda _, ctx: None
        return call

    def _finish(self, ctx: Any) -> None:
        self._worker.close(CLOSE_TIMEOUT)
        self._worker.report()


def with_fields(kind: Callable[..., T], known: Mapping[str, Any]) -> T:
    """Make a dataclass of what is known; the other fields have their defaults."""
    return kind(**{each.name: known[each.name] for each in fields(kind) if each.name in known})  # type: ignore[arg-type]


class CallbackManager(list[Any]):
    """Callbacks, as ``Trainer(callbacks=manager)`` takes them, with the methods of InstructLab's and its siblings'."""

    def add_callback(self, callback: object) -> None:
        self.append(callback)

    def remove_callback(self, callback_or_type: object) -> None:
        """Remove a callback, or all of a class."""
        kind = callback_or_type
        self[:] = [each for each in self if not (isinstance(each, kind) if isinstance(kind, type) else each is kind)]
