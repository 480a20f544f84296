"""What a handler is given: one context class for each payload.

A context is reused from one firing to the next: it is valid inside the handler, and ``ctx.copy()`` keeps it. Numbers
that live on a device are lazy: reading them waits for the device, not reading them costs nothing. A step's ``loss`` is
this rank's share of it; what is global (``logs``, ``metrics``, ``grad_norm``) has been reduced before any handler
runs, so that no read ever hides a collective.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from dalsegno.args import TrainingArguments
from dalsegno.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    Number = float | torch.Tensor | None

Outputs = MutableMapping[str, Any]


class TrainerLike(Protocol):
    """What a handler may ask of whoever runs the loop: the Trainer, or a Run around a loop of one's own."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Fire ``on_log`` with kind "user". On all ranks, with the same values."""

    def stop(self, reason: str = ..., *, save: bool = True) -> None:
        """Ask for the end of training at this step's end."""

    def skip_samples(self, samples: int) -> int:
        """Pass over samples of the epoch that begins. In on_epoch_begin, on all ranks; how many it has been."""


@dataclass(slots=True)
class Context:
    """What every handler is given. Events without more to say pass just this."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    """The user's own model, not what DDP or the compiler has made of it."""
    optimizer: Optimizer
    lr_scheduler: Any
    processing_class: Any
    train_dataloader: Any
    eval_dataloader: Any
    """What is evaluated on, by name where there are several sets. May be read, but not while it is evaluated on."""
    trainer: TrainerLike

    def copy(self) -> Self:
        """The context and the run's state as they are now, to keep after the handler has returned."""
        kept = copy.copy(self)
        kept.state = self.state.copy()
        return kept


@dataclass(slots=True)
class PlainContext(Context):
    def fill(self) -> None:
        """Each context takes its firing's payload here, with arguments of its own. For the loop, not for handlers."""


@dataclass(slots=True)
class BeforeLoadContext(Context):
    path: Path | None = field(init=False)
    """The checkpoint that was chosen and verified; None where there is none."""
    step: int = field(init=False)

    def fill(self, path: Path | None, step: int) -> None:
        self.path, self.step = path, step


@dataclass(slots=True)
class LoadContext(Context):
    path: Path = field(init=False)
    step: int = field(init=False)
    report: Any = field(init=False)
    """What was restored, what is new, what is carried forward (printable)."""

    def fill(self, path: Path, step: int, report: object) -> None:
        self.path, self.step, self.report = path, step, report


@dataclass(slots=True)
class TrainBeginContext(Context):
    resumed_from: Path | None = field(init=False)

    def fill(self, resumed_from: Path | None) -> None:
        self.resumed_from = resumed_from


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
    """Of the micro-batch within its step, from 0."""
    samples: int = field(init=False)
    """True samples of this rank in it; 0: it is padding, so that all ranks have equally many, and counts nowhere."""

    def fill(self, batch: object, index: int, samples: int) -> None:
        self.batch, self.index, self.samples = batch, index, samples


@dataclass(slots=True)
class BeforeForwardContext(Context):
    batch: Any = field(init=False)
    call_args: list[Any] = field(init=False)
    """Positional arguments of the model's call; may be changed."""
    call_kwargs: dict[str, Any] = field(init=False)
    """Keyword arguments of the model's call; may be changed."""

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
        """Of this micro-batch, on this rank; in on_step_end, this rank's share of the step's. Lazy."""
        return _read(self._loss)


@dataclass(slots=True)
class BackwardContext(LossContext):
    outputs: Outputs = field(init=False)
    """``outputs["loss"]`` may be changed in on_before_backward."""

    def fill(self, outputs: Outputs, loss: Number) -> None:
        self.outputs, self._loss = outputs, loss


@dataclass(slots=True)
class MicrobatchEndContext(LossContext):
    outputs: Outputs = field(init=False)
    batch: Any = field(init=False)
    index: int = field(init=False)
    samples: int = field(init=False)
    """True samples of this rank in it; 0: it is padding, and counts nowhere."""
    is_last: bool = field(init=False)
    """Whether the update follows."""

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
        """Total L2 norm of all gradients before clipping, on all ranks. None where nothing asked for it. Lazy."""
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
        """The step that has just been finished, counted from 1."""
        return self.state.global_step

    @property
    def grad_norm(self) -> float | None:
        """As in on_pre_optimizer_step. Lazy."""
        return None if self._grad_norm is None else _read(self._grad_norm)

    @property
    def lr(self) -> float:
        """The learning rate that this update used (first parameter group)."""
        return _read(self._lr)

    @property
    def tokens_seen(self) -> int:
        """On all ranks. Exact at each record; in between, this rank's count stands for the others'."""
        return self.state.num_input_tokens_seen

    @property
    def samples_seen(self) -> int:
        """On all ranks."""
        return self.state.samples_seen

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, over all legs."""
        return self.state.elapsed()


@dataclass(slots=True)
class MetricsContext(Context):
    metrics: dict[str, Any] = field(init=False)

    def fill(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics


@dataclass(slots=True)
class LogContext(Context):
    logs: dict[str, Any] = field(init=False)
    kind: str = field(init=False)
    """``train``, ``eval``, ``final``, or ``user`` for what ``trainer.log`` was given."""
    evaluated_weights: str | None = field(init=False)
    """Of an evaluation: the key of the callback whose averages were measured; None: the model's own weights were."""

    def fill(self, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
        self.logs, self.kind, self.evaluated_weights = logs, kind, evaluated_weights


@dataclass(slots=True)
class EvaluateBeginContext(Context):
    name: str = field(init=False)
    evaluated_weights: str | None = field(init=False)
    """A handler that puts other weights into the model's place says so here, by its callback's key; None: nobody."""

    def fill(self, name: str) -> None:
        self.name, self.evaluated_weights = name, None


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
    """True samples of this rank in the batch; 0: it is padding, and counts nowhere."""

    def fill(self, batch: object, outputs: Outputs, index: int, samples: int) -> None:
        self.batch, self.outputs, self.index, self.samples = batch, outputs, index, samples


@dataclass(slots=True)
class EvaluateContext(Context):
    metrics: dict[str, Any] = field(init=False)
    name: str = field(init=False)
    """``eval``, or the key of ``eval_dataset`` where that is a dict."""
    evaluated_weights: str | None = field(init=False)
    """The key of the callback whose averages were measured; None: the model's own weights were."""

    def fill(self, metrics: dict[str, Any], name: str, evaluated_weights: str | None) -> None:
        self.metrics, self.name, self.evaluated_weights = metrics, name, evaluated_weights


@dataclass(slots=True)
class BeforeSaveContext(Context):
    path: Path = field(init=False)
    step: int = field(init=False)

    def fill(self, path: Path, step: int) -> None:
        self.path, self.step = path, step


@dataclass(slots=True)
class SaveContext(Context):
    path: Path = field(init=False)
    step: int = field(init=False)
    is_best: bool = field(init=False)

    def fill(self, path: Path, step: int, is_best: bool) -> None:
        self.path, self.step, self.is_best = path, step, is_best


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
    metrics: dict[str, Any] = field(init=False)
    checkpoint: Path | None = field(init=False)
    """The newest one of this run; on the way out of an exception, on_save did not tell of it."""

    def fill(self, reason: str, metrics: dict[str, Any], checkpoint: Path | None = None) -> None:
        self.reason, self.metrics, self.checkpoint = reason, metrics, checkpoint


def _read(number: Number) -> float:
    return float(number) if number is not None else float("nan")
