"""mini_trainer's dialect: observers like InstructLab's, with a ``TrainingContext`` that counts as mini_trainer does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .observers import CallbackManager, Observer, SharedState, with_fields

__all__ = ["DIALECT", "CallbackManager", "MiniTrainer", "TrainerCallback", "TrainingContext"]


@dataclass
class TrainingContext:
    """A snapshot, separate for each callback. A value not yet known in this step is None, never an older one."""

    hook_name: str = ""
    step: int = 0
    """Updates begun or done: the present step counts from ``on_pre_optimizer_step`` on."""
    epoch: int = 0
    """Epochs that have ended; the present one counts in its ``on_epoch_end``."""
    total_samples: int = 0
    total_tokens: int | None = None

    loss: float | None = None
    learning_rate: float | None = None
    """Learning rate of this step's update."""
    grad_norm: float | None = None

    batch_metrics: dict[str, Any] = field(default_factory=dict)
    """mini_trainer's twenty numbers of the step, from the update on."""
    val_metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint_path: str | None = None

    output_dir: str = ""
    model_name_or_path: str = ""
    training_mode: str = ""
    """``"step"`` with ``max_steps``, else ``"epoch"``."""
    max_epochs: int = 0
    max_steps: int = 0
    max_tokens: int = 0
    """Always 0: dalsegno has no such setting."""
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


class TrainerCallback:
    """Base class with mini_trainer's methods. Override only those that are needed; each may be async."""

    def on_train_begin(self, context: TrainingContext) -> Any: ...

    on_epoch_begin = on_step_begin = on_before_forward = on_after_backward = on_pre_optimizer_step = on_train_begin
    on_optimizer_step = on_log = on_evaluate = on_save = on_step_end = on_epoch_end = on_train_end = on_train_begin


class MiniTrainer(Observer):
    """Adapts a ``TrainerCallback`` of mini_trainer."""

    dialect = "mini_trainer"
    packages = ("mini_trainer", "dalsegno.interop.mini_trainer")

    def context(self, known: dict[str, Any], shared: SharedState) -> TrainingContext:
        max_steps = max(shared.args.max_steps, 0)
        counted = {
            "step": known["step" if known["hook_name"] == "on_pre_optimizer_step" else "steps_done"],
            "epoch": known["epochs_done"],
            "learning_rate": known.get("step_learning_rate"),
            "training_mode": "step" if max_steps else "epoch",
            "max_steps": max_steps,
        }
        return with_fields(TrainingContext, {**known, **counted, "batch_metrics": _batch_metrics(known | counted)})


def _batch_metrics(known: dict[str, Any]) -> dict[str, Any]:
    """Return the step's numbers by mini_trainer's names; what is not known is None."""
    batch, seconds, loss = known["batch_metrics"], known.get("elapsed_time"), known.get("loss")
    if not batch:
        return {}
    passes, tokens = batch["num_minibatches"], batch["total_length"]
    return {
        "step": known["step"],
        "epoch": known["epoch"],
        "steps_per_epoch": None,
        "lr": known["learning_rate"],
        "grad_norm": known.get("grad_norm"),
        "loss": loss,
        "avg_loss_backward": _ratio(loss, passes),
        "num_samples": batch["total_samples"],
        "num_loss_counted_tokens": batch["num_loss_counted_tokens"],
        "batch_num_loss_counted_tokens": batch["num_loss_counted_tokens"],
        "num_total_tokens": tokens,
        "grad_accum": passes,
        "avg_time_per_minibatch": _ratio(seconds, passes),
        "time_per_batch": seconds,
        "tokens_per_second": _ratio(tokens, seconds),
        "total_samples_accumulated": known["total_samples"],
        "total_tokens_accumulated": known["total_tokens"],
        "samples_per_second": _ratio(batch["total_samples"], seconds),
        "peak_memory_usage_GB": None,
        "val_loss": known["val_metrics"].get("val_loss"),
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None else part / whole


DIALECT = MiniTrainer
