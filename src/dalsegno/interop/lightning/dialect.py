"""Lightning's dialect: callbacks of ``lightning`` or ``pytorch_lightning``.

:data:`ROWS` is the whole order. A *batch* is a micro-batch: the ``on_train_batch_end`` of a step's last one
comes after the update. The state is what ``state_dict`` returns, and what ``on_save_checkpoint`` puts into its dict,
which has the epoch and the step, but neither the model's state nor other callbacks'.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dalsegno.errors import UnknownName
from dalsegno.events.table import Event
from dalsegno.interop.call_table import Row, TableAdapter
from dalsegno.stateful.component import State

from .trainer import SharedState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


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
