"""SharedState, State and Logger: the arguments of Composer's callbacks; other attributes than theirs raise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.contexts import (
    Context,
    EpochContext,
    EvaluateBeginContext,
    EvaluateContext,
    LoadContext,
    RollbackContext,
)
from dalsegno.interop.progress import Progress, ProgressState
from dalsegno.interop.stand_in import StandIn, reads
from dalsegno.logs import is_wall_clock

from .time import Timestamp, time_of


class ComposerState(ProgressState):
    metrics: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Metric:
    """Stands in for a metric of torchmetrics: the value of the newest evaluation."""

    value: float

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)


class SharedState(Progress):
    """The state and the logger of all of Composer's callbacks in one run."""

    name = "composer"
    state_schema = ComposerState

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.epochs = 0
        """Finished epochs."""
        self._set_name = ""  # of the newest evaluation
        self.metrics: dict[str, dict[str, float]] = {}
        """By label, the numbers of the newest evaluation."""
        self.state = State(self)
        self.logger = Logger(self)

    def on_load(self, ctx: LoadContext) -> None:
        self.epochs = int(ctx.state.epoch)

    def on_rollback(self, ctx: RollbackContext) -> None:
        super().on_rollback(ctx)
        self.epochs = self.epoch

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        super().on_epoch_begin(ctx)
        self.epochs = ctx.epoch

    def on_epoch_end(self, ctx: EpochContext) -> None:
        super().on_epoch_end(ctx)
        self.epochs = ctx.epoch + 1

    @property
    def label(self) -> str:
        """``train``; in an evaluation its set's name, or ``eval``."""
        return self._set_name if self.validating else "train"

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        super().on_evaluate_begin(ctx)
        self._set_name = ctx.name

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        super().on_evaluate(ctx)
        prefix = "eval_" if ctx.name == "eval" else f"eval_{ctx.name}_"
        numbers = {name: float(value) for name, value in ctx.metrics.items() if not is_wall_clock(name)}
        self.metrics[ctx.name] = {**numbers, **{name.removeprefix(prefix): value for name, value in numbers.items()}}

    def state_dict(self) -> Any:
        return {**super().state_dict(), "metrics": self.metrics}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.metrics = {label: dict(numbers) for label, numbers in state["metrics"].items()}


class State(StandIn):
    """Stands in for ``state``. Callbacks may set further attributes on it."""

    _stands_for = "state"
    algorithms: tuple[Any, ...] = ()
    train_metrics = None
    fsdp_enabled = is_model_ddp = deepspeed_enabled = False
    batch: Any = reads("_shared.batch")
    """The micro-batch, or batch of an evaluation, in progress."""
    outputs: Any = reads("_shared.outputs")
    train_dataloader: Any = reads("_context.train_dataloader")
    dataloader_label: str = reads("_shared.label")
    device_train_microbatch_size: int = reads("_context.args.per_device_train_batch_size")

    def __init__(self, shared: SharedState) -> None:
        context = shared.context
        self._shared, self._context = shared, context
        self.model = context.model
        self.optimizers = [context.optimizer]
        schedulers = context.lr_scheduler
        several = isinstance(schedulers, (list, tuple))
        self.schedulers = list(schedulers) if several else [each for each in [schedulers] if each is not None]
        self.device = device_of(context.model)
        self.seed = self.rank_zero_seed = context.args.seed
        self.run_name = context.args.run_name or context.args.directory.name

    @property
    def timestamp(self) -> Timestamp:
        shared, state = self._shared, self._context.state
        return Timestamp(
            epoch=time_of(shared.epochs, "ep"),
            batch=time_of(state.global_step, "ba"),
            sample=time_of(state.samples_seen, "sp"),
            token=time_of(state.num_input_tokens_seen, "tok"),
            batch_in_epoch=time_of(shared.steps, "ba"),
            sample_in_epoch=time_of(shared.samples, "sp"),
            total_wct=timedelta(seconds=state.elapsed()),
        )

    @property
    def max_duration(self) -> Any:
        """Steps, or epochs if ``max_steps`` is not set."""
        args = self._context.args
        return time_of(args.max_steps, "ba") if args.max_steps > 0 else time_of(args.num_train_epochs, "ep")

    def get_elapsed_duration(self) -> Any:
        """Return the fraction of the run that is done; None where its length is unknown."""
        state = self._context.state
        return time_of(state.global_step / state.max_steps, "dur") if state.max_steps > 0 else None

    @property
    def loss(self) -> Any:
        """Of the newest micro-batch, without gradient."""
        return self._shared.outputs["loss"].detach()

    def batch_get_item(self, key: Any) -> Any:
        return self.batch[key]

    @property
    def dataloader(self) -> Any:
        if self._shared.label == "train":
            return self._context.train_dataloader
        loaders = self._context.eval_dataloader
        return loaders[self._shared.label] if isinstance(loaders, Mapping) else loaders

    @property
    def eval_metrics(self) -> dict[str, dict[str, Metric]]:
        """By label and name, with and without ``eval_``: metrics whose ``compute()`` returns the newest value."""
        metrics = self._shared.metrics
        return {label: {name: Metric(value) for name, value in each.items()} for label, each in metrics.items()}

    @property
    def callbacks(self) -> list[Any]:
        """Every callback; those of other libraries without their adapters."""
        return [inspect.unwrap(callback) for callback in self._context.trainer.callbacks]

    def stop_training(self) -> None:
        """End the run after this step, with a checkpoint."""
        self._context.control.stop("it called state.stop_training()", final=True)


class Logger(StandIn):
    """Stands in for ``logger``: what is logged is in dalsegno's records."""

    _stands_for = "logger"
    destinations: tuple[Any, ...] = ()

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the record of this step or evaluation. ``step`` is ignored."""
        self._shared.collected.add(metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Nothing: JsonLogger's header is the place for them."""
