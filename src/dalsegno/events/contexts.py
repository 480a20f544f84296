"""Contexts: what handlers receive, one class per payload.

A context is reused from one firing to the next: it is valid inside the handler; ``ctx.copy()`` keeps its values.
Numbers on a device are lazy: reading one syncs the device, not reading it costs nothing. A step's ``loss`` is this
rank's share; global values (``logs``, ``metrics``, ``grad_norm``) are reduced before any handler runs, so that reading
them never runs a collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from dalsegno.args import TrainingArguments
from dalsegno.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from dalsegno.control.queue import CommandQueue
    from dalsegno.distributed.layout import Layout

    Number = float | torch.Tensor | None

Outputs = MutableMapping[str, Any]
Metrics = dict[str, Any]


class TrainerLike(Protocol):
    """What a handler may use of the object that runs the loop: a Trainer, or a Run around the user's own loop."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl

    @property
    def commands(self) -> CommandQueue: ...
    @property
    def callbacks(self) -> list[Any]: ...
    @property
    def switched_off(self) -> frozenset[str]: ...

    def log(self, metrics: MutableMapping[str, Any], kind: str = ...) -> None:
        """Fire ``on_log``, with kind "user" by default. Call on all ranks, with the same values."""

    def stop(self, reason: str = ..., *, save: bool = True) -> None:
        """Request the end of training after this step."""

    def skip_samples(self, samples: int) -> int:
        """Skip samples at the start of an epoch. Call in on_epoch_begin, on all ranks. Returns the number skipped."""


@dataclass(slots=True)
class Context:
    """What every handler receives. Events without a payload pass just this."""

    args: TrainingArguments
    layout: Layout
    """Which ranks read the same data: ``data_rank``, ``data_size``, and sums over the data ranks."""
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    """The user's own model, not the one that DDP or the compiler has wrapped."""
    optimizer: Optimizer
    lr_scheduler: Any
    processing_class: Any
    train_dataloader: Any
    eval_dataloader: Any
    """The evaluation data, by name if there are several sets. May be read, but not during its evaluation."""
    trainer: TrainerLike

    def __getattr__(self, name: str) -> Any:
        parts = ("state", "control", "trainer", "args")
        for part in () if name in parts or name.startswith("_") else parts:
            if hasattr(getattr(self, part), name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; use ctx.{part}.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def copy(self) -> Self:
        """Copy the context and the run's state, to keep after the handler has returned."""
        kept = copy.copy(self)
        kept.state = self.state.copy()
        return kept


@dataclass(slots=True)
class PlainContext(Context):
    def fill(self) -> None:
        """Set the firing's payload; each context has its own arguments. For the loop, not for handlers."""


@dataclass(slots=True)
class BeforeLoadContext(Context):
    path: Path | None = field(init=False)
    """The selected and verified checkpoint; None if there is none."""
    step: int = field(init=False)

    def fill(self, path: Path | None, step: int) -> None:
        self.path, self.step = path, step


@dataclass(slots=True)
class LoadContext(Context):
    path: Path = field(init=False)
    step: int = field(init=False)
    report: Any = field(init=False)
    """Which components were restored, are new, or are carried forward (printable)."""

    def fill(self, path: Path, step: int, report: object) -> None:
        self.path, self.step, self.report = path, step, report


@dataclass(slots=True)
class TrainBeginContext(Context):
    resumed_from: Path | None = field(init=False)
    memory_checkpoints: str | None = field(init=False)
    """Their size and place on this host, and the memory that is free there; None if the run saves none."""

    def fill(self, resumed_from: Path | None, memory_checkpoints: str | None) -> None:
        self.resumed_from, self.memory_checkpoints = resumed_from, memory_checkpoints


@dataclass(slots=True)
class EpochContext(Context):
    epoch: int = field(init=False)
    """From 0."""

    def fill(self, epoch: int) -> None:
        self.epoch = epoch


@dataclass(slots=True)
class MicrobatchBeginContext(Context):
    batch: Any = field(init=False)
    index: int = field(init=False)
    """Index of the micro-batch within its step, from 0."""
    samples: int = field(init=False)
    """True samples of this rank in it; 0 for padding, which makes the ranks' counts equal and is ignored."""

    def fill(self, batch: object, index: int, samples: int) -> None:
        self.batch, self.index, self.samples = batch, index, samples


@dataclass(slots=True)
class BeforeForwardContext(Context):
    batch: Any = field(init=False)
    call_args: list[Any] = field(init=False)
    """Positional arguments of the model's call; handlers may change them."""
    call_kwargs: dict[str, Any] = field(init=False)
    """Keyword arguments of the model's call; handlers may change them."""

    def fill(self, batch: object, call_args: list[Any], call_kwargs: dict[str, Any]) -> None:
        self.batch, self.call_args, self.call_kwargs = batch, call_args, call_kwargs


@dataclass(slots=True)
class AfterForwardContext(Context):
    outputs: Outputs = field(init=False)
    batch: Any = field(init=False)

    def fill(self, outputs: Outputs, batch: object) -> None:
        self.outputs, self.batch = outputs, batch


@dataclass(slots=True)
class LossContext(Context):
    _loss: Number = field(init=False, repr=False)

    @property
    def loss(self) -> float:
        """Loss of this micro-batch on this rank; in on_step_end, this rank's share of the step's loss. Lazy."""
        return _read(self._loss)


@dataclass(slots=True)
class BackwardContext(LossContext):
    outputs: Outputs = field(init=False)
    """Handlers of on_before_backward may change ``outputs["loss"]``."""

    def fill(self, outputs: Outputs, loss: Number) -> None:
        self.outputs, self._loss = outputs, loss


@dataclass(slots=True)
class MicrobatchEndContext(LossContext):
    outputs: Outputs = field(init=False)
    batch: Any = field(init=False)
    index: int = field(init=False)
    samples: int = field(init=False)
    """True samples of this rank in it; 0 for padding, which is ignored."""
    is_last: bool = field(init=False)
    """Whether the optimizer step follows."""

    def fill(self, loss: Number, outputs: Outputs, batch: object, index: int, samples: int, is_last: bool) -> None:
        self._loss, self.outputs, self.batch = loss, outputs, batch
        self.index, self.samples, self.is_last = index, samples, is_last


@dataclass(slots=True)
class PreOptimizerStepContext(Context):
    _grad_norm: Number = field(init=False, repr=False)

    def fill(self, grad_norm: Number) -> None:
        self._grad_norm = grad_norm

    @property
    def grad_norm(self) -> float | None:
        """Total L2 norm of all gradients on all ranks before clipping. None if nothing requires it. Lazy."""
        return None if self._grad_norm is None else _read(self._grad_norm)


@dataclass(slots=True)
class StepSkippedContext(Context):
    reason: str = field(init=False)

    def fill(self, reason: str) -> None:
        self.reason = reason


@dataclass(slots=True)
class SchedulerContext(Context):
    scheduler: Any = field(init=False)

    def fill(self, scheduler: object) -> None:
        self.scheduler = scheduler


@dataclass(slots=True)
class StepEndContext(LossContext):
    _grad_norm: Number = field(init=False, repr=False)
    _lr: Number = field(init=False, repr=False)

    def fill(self, loss: Number, grad_norm: Number, lr: Number) -> None:
        self._loss, self._grad_norm, self._lr = loss, grad_norm, lr

    @property
    def step(self) -> int:
        """The step that has just finished, counted from 1."""
        return self.state.global_step

    @property
    def grad_norm(self) -> float | None:
        """As in on_pre_optimizer_step. Lazy."""
        return None if self._grad_norm is None else _read(self._grad_norm)

    @property
    def unread_grad_norm(self) -> Number:
        """The same as a 0-dim tensor on its device, to compute with without a sync."""
        return self._grad_norm

    @property
    def lr(self) -> float:
        """The learning rate that this update used (first parameter group)."""
        return _read(self._lr)

    @property
    def tokens_seen(self) -> int:
        """Tokens on all ranks. Exact at each record; in between, extrapolated from this rank's count."""
        return self.state.num_input_tokens_seen

    @property
    def samples_seen(self) -> int:
        """Samples on all ranks."""
        return self.state.samples_seen

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, over all legs."""
        return self.state.elapsed()


@dataclass(slots=True)
class MetricsContext(Context):
    metrics: Metrics = field(init=False)

    def fill(self, metrics: Metrics) -> None:
        self.metrics = metrics


@dataclass(slots=True)
class LogContext(Context):
    logs: dict[str, Any] = field(init=False)
    kind: str = field(init=False)
    """``train``, ``eval``, ``final``, or ``user`` for a call of ``trainer.log``."""
    evaluated_weights: str | None = field(init=False)
    """For an evaluation, the key of the callback whose averaged weights were measured; None: the model's own."""

    def fill(self, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
        self.logs, self.kind, self.evaluated_weights = logs, kind, evaluated_weights


@dataclass(slots=True)
class EvaluateBeginContext(Context):
    name: str = field(init=False)
    evaluated_weights: str | None = field(init=False, default=None)
    """A handler that swaps in other weights sets this to its callback's key; None: the model's own weights."""

    batches: int | None = field(init=False)
    """Batches of the set on this rank; None: unknown."""
    between_batches: list[Callable[[int], None]] = field(init=False)
    """Functions that handlers append: each is called before each batch, with the number of those done."""

    def fill(self, name: str, batches: int | None = None) -> None:
        self.name, self.evaluated_weights, self.batches, self.between_batches = name, None, batches, []


@dataclass(slots=True)
class EvaluateEndContext(Context):
    name: str = field(init=False)

    def fill(self, name: str) -> None:
        self.name = name


@dataclass(slots=True)
class PredictionStepContext(Context):
    batch: Any = field(init=False)
    outputs: Outputs = field(init=False)
    index: int = field(init=False)
    samples: int = field(init=False)
    """True samples of this rank in the batch; 0 for padding, which is ignored."""

    def fill(self, batch: object, outputs: Outputs, index: int, samples: int) -> None:
        self.batch, self.outputs, self.index, self.samples = batch, outputs, index, samples


@dataclass(slots=True)
class EvaluateContext(Context):
    metrics: Metrics = field(init=False)
    name: str = field(init=False)
    """``eval``, or the key of ``eval_dataset`` if that is a dict."""
    evaluated_weights: str | None = field(init=False)
    """The key of the callback whose averaged weights were measured; None: the model's own."""
    all_metrics: Metrics = field(init=False)
    """Metrics of all sets measured so far in this evaluation, including those of a previous leg that it interrupted."""
    is_last: bool = field(init=False)
    """Whether this set is the evaluation's last."""

    def fill(
        self, metrics: Metrics, name: str, evaluated_weights: str | None, all_metrics: Metrics, is_last: bool
    ) -> None:
        self.metrics, self.name, self.evaluated_weights = metrics, name, evaluated_weights
        self.all_metrics, self.is_last = all_metrics, is_last


@dataclass(slots=True)
class BeforeSaveContext(Context):
    path: Path = field(init=False)
    step: int = field(init=False)

    def fill(self, path: Path, step: int) -> None:
        self.path, self.step = path, step


@dataclass(slots=True)
class SaveContext(Context):
    """``state`` is that of the checkpoint: a copy, if the run has trained further steps since."""

    path: Path = field(init=False)
    step: int = field(init=False)
    is_best: bool = field(init=False)

    def fill(self, path: Path, step: int, is_best: bool, state: TrainerState) -> None:
        self.path, self.step, self.is_best, self.state = path, step, is_best, state


@dataclass(slots=True)
class StepDoneContext(Context):
    step: int = field(init=False)

    def fill(self, step: int) -> None:
        self.step = step


@dataclass(slots=True)
class RollbackContext(Context):
    from_step: int = field(init=False)
    to_step: int = field(init=False)
    reason: str = field(init=False)

    def fill(self, from_step: int, to_step: int, reason: str) -> None:
        self.from_step, self.to_step, self.reason = from_step, to_step, reason


@dataclass(slots=True)
class ExceptionContext(Context):
    exception: BaseException = field(init=False)

    def fill(self, exception: BaseException) -> None:
        self.exception = exception


@dataclass(slots=True)
class TrainEndContext(Context):
    reason: str = field(init=False)
    metrics: Metrics = field(init=False)
    checkpoint: Path | None = field(init=False)
    """The newest of this run; after an exception, on_save did not fire for it."""

    def fill(self, reason: str, metrics: Metrics, checkpoint: Path | None = None) -> None:
        self.reason, self.metrics, self.checkpoint = reason, metrics, checkpoint


def _read(number: Number) -> float:
    return float(number) if number is not None else float("nan")
