"""TrainingContext: the argument of InstructLab's callbacks; FunctionContext: that of functions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from dalsegno.args import TrainingArguments
from dalsegno.interop.stand_in import reads


class BatchMetrics(dict[str, Any]):
    """The seven numbers of a step's batch, by key, and as attributes; empty, and None, before the update.

    - ``total_samples`` of this step, on all ranks
    - ``total_length``: tokens of this step, on all ranks; on several ranks known only if the callback has
      ``on_step_end``, and from then on
    - ``num_loss_counted_tokens``: labels other than -100; one rank only
    - ``accumulated_loss``: the loss summed over those; one rank only, and if the callback has ``on_step_end``
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

    All numbers are equal on all ranks; on several ranks, a number that would differ is None.
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
    """Seconds that this step took; None on several ranks."""
    overall_throughput: float | None = None
    """Samples per second on all ranks: of this step; on several ranks of the steps since the last record, known from
    ``on_log`` on."""
    cuda_mem_allocated: float | None = None
    """GiB; None on several ranks."""

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

    @classmethod
    def of(cls, context: TrainingContext, args: TrainingArguments) -> FunctionContext:
        return cls(**{each.name: getattr(context, each.name) for each in fields(TrainingContext)}, args=args)

    global_step: ClassVar[int] = reads("step")
    samples_seen: ClassVar[int] = reads("total_samples")
    avg_loss_across_ranks: ClassVar[float | None] = reads("loss")
    current_lr: ClassVar[float | None] = reads("learning_rate")
    global_grad_norm: ClassVar[float | None] = reads("grad_norm")
    is_main_process: ClassVar[bool] = reads("is_world_process_zero")
