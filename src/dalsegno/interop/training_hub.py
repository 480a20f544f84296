"""training_hub's dialect: a ``TrainingHubCallback`` with nine methods, which get one ``TrainingHubContext``.

A callback is called on rank 0 unless its ``run_on_all_ranks`` is True; what it raises is logged and counted, and
training continues. Since it may set flags of ``context.control``, it is called on the training thread; with
``sets_control_flags = False`` it runs in the background, as InstructLab's observers do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dalsegno.events.table import Event
from dalsegno.state import TrainerControl

from .observers import Observer, SharedState

__all__ = ["DIALECT", "TrainingHub", "TrainingHubCallback", "TrainingHubContext"]


@dataclass
class TrainingHubContext:
    """A snapshot. A value not yet known in this step is None, never an older one."""

    step: int = 0
    """Finished steps."""
    epoch: int = 0
    """From 0."""
    loss: float | None = None
    """Of this step, or of the record in ``on_log``; if not known, that of this step's evaluation."""
    learning_rate: float | None = None
    """Learning rate of the next step: read after the scheduler's step."""
    is_main_process: bool = True
    output_dir: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    """All other numbers that are known of this step, and ``checkpoint_path`` from ``on_save`` on."""
    control: TrainerControl | None = None
    """The run's control: ``should_save`` and ``should_training_stop`` act at the end of the step."""


class TrainingHubCallback:
    """Base class with training_hub's methods. Override only those that are needed."""

    run_on_all_ranks: bool = False

    def on_train_begin(self, context: TrainingHubContext) -> Any: ...

    on_epoch_begin = on_step_begin = on_log = on_evaluate = on_save = on_train_begin
    on_step_end = on_epoch_end = on_train_end = on_train_begin


_METRICS = ("loss", "learning_rate", "grad_norm", "elapsed_time", "overall_throughput", "cuda_mem_allocated")


class TrainingHub(Observer):
    """Adapts a ``TrainingHubCallback``."""

    dialect = "training_hub"
    packages = ("training_hub", "dalsegno.interop.training_hub")
    bases = ("TrainingHubCallback",)
    calls = tuple(
        (event, method)
        for event, method in Observer.calls
        # on_step_end comes before the record: its flags act at the end of its own step
        if hasattr(TrainingHubCallback, method) and event is not Event.STEP_DONE
    )
    instead = {
        "JITCheckpointCallback": "leave it out: a run saves by itself at SIGTERM",
        "RemoteCheckpointSyncCallback": "set output_dir to the URL of the storage",
    }
    sets_control_flags = True

    def __init__(self, foreign: object, name: str | None = None) -> None:
        super().__init__(foreign, name)
        self.ranks = "all" if getattr(foreign, "run_on_all_ranks", False) else "zero"

    def context(self, known: dict[str, Any], shared: SharedState) -> TrainingHubContext:
        metrics = {name: known[name] for name in (*_METRICS, "checkpoint_path") if known.get(name) is not None}
        metrics |= known["batch_metrics"] | known["val_metrics"]
        return TrainingHubContext(
            step=known["steps_done"],
            epoch=known["epoch"],
            loss=metrics.get("loss", metrics.get("val_loss")),
            learning_rate=known.get("learning_rate"),
            is_main_process=known["is_world_process_zero"],
            output_dir=known["output_dir"],
            metrics=metrics,
            control=shared.control if self.sets_control_flags else None,
        )


DIALECT = TrainingHub
