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
from dalsegno.errors import no_attribute
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


_PARTS = ("state", "control", "trainer", "args")


@dataclass(slots=True)
class Context:
    """What every handler receives. Events without a payload pass just this.

    These fields are set once; each firing calls ``__init__``, which sets those that the event adds.
    """

    args: TrainingArguments = field(init=False)
    layout: Layout = field(init=False)
    """Which ranks read the same data: ``data_rank``, ``data_size``, and sums over the data ranks."""
    state: TrainerState = field(init=False)
    control: TrainerControl = field(init=False)
    model: nn.Module = field(init=False)
    """The user's own model, not the one that DDP or the compiler has wrapped."""
    optimizer: Optimizer = field(init=False)
    lr_scheduler: Any = field(init=False)
    processing_class: Any = field(init=False)
    train_dataloader: Any = field(init=False)
    eval_dataloader: Any = field(init=False)
    """The evaluation data, by name if there are several sets. May be read, but not during its evaluation."""
    trainer: TrainerLike = field(init=False)

    def __getattr__(self, name: str) -> Any:
        parts = () if name in _PARTS or name.startswith("_") else _PARTS
        own = {} if name in self.__dataclass_fields__ else {"ctx": self.__dataclass_fields__}
        raise no_attribute(self, name, own | {f"ctx.{part}": dir(getattr(self, part)) for part in parts})

    def copy(self) -> Self:
        """Copy the context and the run's state, to keep after the handler has returned."""
        kept = copy.copy(self)
        kept.state = self.state.copy()
        return kept


@dataclass(slots=True)
class BeforeLoadContext(Context):
    path: Path | None
    """The selected and verified checkpoint; None if there is none."""
    step: int


@dataclass(slots=True)
class LoadContext(Context):
    path: Path
    step: int
    report: Any
    """Which components were restored, are new, or are carried forward (printable)."""


@dataclass(slots=True)
class TrainBeginContext(Context):
    resumed_from: Path | None
    memory_checkpoints: str | None
    """Their size and place on this host, and the memory that is free there; None if the run saves none."""


@dataclass(slots=True)
class EpochContext(Context):
    epoch: int
    """From 0."""


@dataclass(slots=True)
class MicrobatchBeginContext(Context):
    batch: Any
    index: int
    """Index of the micro-batch within its step, from 0."""
    samples: int
    """True samples of this rank in it; 0 for padding, which makes the ranks' counts equal and is ignored."""


@dataclass(slots=True)
class BeforeForwardContext(Context):
    batch: Any
    call_args: list[Any]
    """Positional arguments of the model's call; handlers may change them."""
    call_kwargs: dict[str, Any]
    """Keyword arguments of the model's call; handlers may change them."""


@dataclass(slots=True)
class AfterForwardContext(Context):
    outputs: Outputs
    batch: Any


@dataclass(slots=True)
class LossContext(Context):
    _loss: Number = field(repr=False)

    @property
    def loss(self) -> float:
        """Loss of this micro-batch on this rank; in on_step_end, this rank's share of the step's loss. Lazy."""
        return _read(self._loss)


@dataclass(slots=True)
class BackwardContext(LossContext):
    outputs: Outputs
    """Handlers of on_before_backward may change ``outputs["loss"]``."""


@dataclass(slots=True)
class MicrobatchEndContext(LossContext):
    outputs: Outputs
    batch: Any
    index: int
    samples: int
    """True samples of this rank in it; 0 for padding, which is ignored."""
    is_last: bool
    """Whether the optimizer step follows."""


@dataclass(slots=True)
class PreOptimizerStepContext(Context):
    _grad_norm: Number = field(repr=False)

    @property
    def grad_norm(self) -> float | None:
        """Total L2 norm of all gradients on all ranks before clipping. None if nothing requires it. Lazy."""
        return None if self._grad_norm is None else _read(self._grad_norm)


@dataclass(slots=True)
class StepSkippedContext(Context):
    reason: str


@dataclass(slots=True)
class SchedulerContext(Context):
    scheduler: Any


@dataclass(slots=True)
class StepEndContext(LossContext):
    _grad_norm: Number = field(repr=False)
    _lr: Number = field(repr=False)

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
    metrics: Metrics


@dataclass(slots=True)
class LogContext(Context):
    logs: dict[str, Any]
    kind: str
    """``train``, ``eval``, ``final``, or ``user`` for a call of ``trainer.log``."""
    evaluated_weights: str | None = None
    """For an evaluation, the key of the callback whose averaged weights were measured; None: the model's own."""


@dataclass(slots=True)
class EvaluateBeginContext(Context):
    name: str
    evaluated_weights: str | None = field(init=False, default=None)
    """A handler that swaps in other weights sets this to its callback's key; None: the model's own weights."""
    batches: int | None = None
    """Batches of the set on this rank; None: unknown."""
    between_batches: list[Callable[[int], None]] = field(init=False, default_factory=list)
    """Functions that handlers append: each is called before each batch, with the number of those done."""


@dataclass(slots=True)
class EvaluateEndContext(Context):
    name: str


@dataclass(slots=True)
class PredictionStepContext(Context):
    batch: Any
    outputs: Outputs
    index: int
    samples: int
    """True samples of this rank in the batch; 0 for padding, which is ignored."""


@dataclass(slots=True)
class EvaluateContext(Context):
    metrics: Metrics
    name: str
    """``eval``, or the key of ``eval_dataset`` if that is a dict."""
    evaluated_weights: str | None
    """The key of the callback whose averaged weights were measured; None: the model's own."""
    all_metrics: Metrics
    """Metrics of all sets measured so far in this evaluation, including those of a previous leg that it interrupted."""
    is_last: bool
    """Whether this set is the evaluation's last."""


@dataclass(slots=True)
class BeforeSaveContext(Context):
    path: Path
    step: int


@dataclass(slots=True)
class SaveContext(Context):
    """``state`` is that of the checkpoint: a copy, if the run has trained further steps since."""

    state: TrainerState
    path: Path
    step: int
    is_best: bool


@dataclass(slots=True)
class StepDoneContext(Context):
    step: int


@dataclass(slots=True)
class RollbackContext(Context):
    from_step: int
    to_step: int
    reason: str


@dataclass(slots=True)
class ExceptionContext(Context):
    exception: BaseException


@dataclass(slots=True)
class TrainEndContext(Context):
    reason: str
    metrics: Metrics
    checkpoint: Path | None = None
    """The newest of this run; after an exception, on_save did not fire for it."""


def _read(number: Number) -> float:
    return float(number) if number is not None else float("nan")
