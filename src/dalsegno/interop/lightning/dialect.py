"""Lightning's dialect: callbacks of ``lightning`` or ``pytorch_lightning``.

:data:`.order.ROWS` is the whole order. A *batch* is a micro-batch: the ``on_train_batch_end`` of a step's last one
comes after the update. The state is what ``state_dict`` returns, and what ``on_save_checkpoint`` puts into its dict,
which has the epoch and the step, but neither the model's state nor other callbacks'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.interop.table_adapter import TableAdapter
from dalsegno.stateful.component import State

from .order import CONDITIONS, ROWS, SILENT, VALUES
from .shared_state import SharedState

_BY_THE_CLOCK = ("Timer",)
"""Callbacks of the library whose state each rank measures by its own clock."""


class Lightning(TableAdapter):
    """Adapts a ``Callback`` of Lightning."""

    dialect = "lightning"
    packages = ("lightning", "pytorch_lightning", "dalsegno.interop.lightning")
    bases = ("Callback",)
    silent = SILENT
    rows = ROWS
    leading = ("trainer", "pl_module")
    values = VALUES
    conditions = CONDITIONS
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
        "DeviceStatsMonitor": "use dalsegno.callbacks.MemoryMonitor",
        "ThroughputMonitor": "use dalsegno.callbacks.RateProfiler",
        "SpikeDetection": "use dalsegno.callbacks.StabilityMonitor",
        "BasePredictionWriter": "write predictions in on_prediction_step of a dalsegno.Callback",
    }

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._shared: SharedState | None = None
        self._set_up_in: object = None  # the leg in which setup() was called
        super().__init__(foreign, name)
        self.state_rehearsed = not self._defines("on_save_checkpoint")  # which is called for real saves only
        if type(foreign).__name__ in _BY_THE_CLOCK and not hasattr(foreign, "state_compared"):
            self.state_compared = False
        for method in ("on_save_checkpoint", "on_load_checkpoint"):
            if self._defines(method):
                self._check_signature(method)

    @property
    def default_name(self) -> str:
        """``state_key`` of a class that defines it, which distinguishes callbacks of one class."""
        return str(self.method("state_key")) if self._defines("state_key") else super().default_name

    def arguments(self, method: str) -> tuple[Any, Any]:
        if method in ("on_save_checkpoint", "on_load_checkpoint"):
            return (*self.leading, "checkpoint"), ()
        return super().arguments(method)

    def shared_state(self, binder: Binder) -> SharedState:
        self._shared = binder.shared(SharedState)
        return self._shared

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        call, shared = super().call(event, method, binder), self.shared_state(binder)

        def set_up(adapted: Any, ctx: Any) -> None:
            if self._set_up_in is not shared.leg:
                self._set_up_in = shared.leg
                call(adapted, ctx)

        def end_validation_epoch(adapted: Any, ctx: Any) -> None:
            call(adapted, ctx)
            if ctx.kind == "eval":
                shared.collected.move_into(ctx)

        return {"setup": set_up, "on_validation_epoch_end": end_validation_epoch}.get(method, call)

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        has_state = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
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
