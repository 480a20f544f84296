"""InstructLab's dialect: observers that get one ``TrainingContext``.

In addition to the thirteen methods of InstructLab's class, those of its first proposal are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from dalsegno.args import TrainingArguments
from dalsegno.errors import ConfigurationError, expect_known
from dalsegno.events.callback import Binder, Callback, Construction, refusal
from dalsegno.events.table import Event
from dalsegno.interop.stand_in import reads
from dalsegno.state import Handler
from dalsegno.system.worker import Counts

from .observers import CallbackManager, Observer, SharedState, with_fields

__all__ = ["DIALECT", "BatchMetrics", "CallbackManager", "InstructLab", "TrainerCallback", "TrainingContext"]


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

    global_step: ClassVar[int] = reads("step")
    samples_seen: ClassVar[int] = reads("total_samples")
    avg_loss_across_ranks: ClassVar[float | None] = reads("loss")
    current_lr: ClassVar[float | None] = reads("learning_rate")
    global_grad_norm: ClassVar[float | None] = reads("grad_norm")
    is_main_process: ClassVar[bool] = reads("is_world_process_zero")


class TrainerCallback:
    """Base class with InstructLab's methods. Override only those that are needed; each may be async."""

    def on_train_begin(self, context: TrainingContext) -> Any: ...

    on_epoch_begin = on_step_begin = on_before_forward = on_after_forward = on_train_begin
    on_before_backward = on_after_backward = on_before_optimizer_step = on_pre_optimizer_step = on_train_begin
    on_after_optimizer_step = on_optimizer_step = on_log = on_evaluate = on_save = on_train_begin
    on_step_end = on_epoch_end = on_train_end = on_train_begin


class InstructLab(Observer):
    """Adapts a ``TrainerCallback`` of InstructLab."""

    dialect = "instructlab"
    packages = ("instructlab", "dalsegno.interop.instructlab")

    def context(self, known: dict[str, Any], shared: SharedState) -> TrainingContext:
        return with_fields(TrainingContext, known | {"batch_metrics": BatchMetrics(known["batch_metrics"])})


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
    expect_known("event", on, EVENTS, _ALIASES)
    given: list[tuple[str, Any]] = [
        (event, each if isinstance(each, list | tuple) else [each]) for event, each in on.items()
    ]
    observers = [_observer(event, function) for event, several in given for function in several]
    made = Functions(observers, name)
    made.construction = Construction(functions, (), {"name": name, **on})
    return made


class FunctionObserver(InstructLab):
    """Calls one function at one event."""

    def context(self, known: dict[str, Any], shared: SharedState) -> FunctionContext:
        return FunctionContext(**vars(super().context(known, shared)), args=shared.args)


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
    """Those of the event's arguments that the function takes."""
    signature = inspect.signature(function)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    accepted = [name for name in added if takes_all or name in signature.parameters]
    if (error := refusal(function, FunctionContext(), **dict.fromkeys(accepted))) is not None:
        given = ", ".join(["context", *(f"{name}=" for name in added)])
        raise ConfigurationError(
            f"functions({event}={getattr(function, '__name__', function)}): cannot be called with ({given}): {error}"
        ) from error
    return accepted


DIALECT = InstructLab
