"""What InstructLab's callbacks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainingContext:
    """A snapshot, each callback's own. What has not become known since the step began is None, never an older value.

    All numbers are the same on all ranks; those that would not be are None where there are several.
    """

    hook_name: str = ""
    step: int = 0
    """Counted from 1; the same from ``on_step_begin`` to ``on_step_end``."""
    epoch: int = 0
    """From 0."""
    total_samples: int = 0
    """Trained on so far, on all ranks."""
    total_tokens: int | None = None
    """The same for tokens; on several ranks known at each record."""

    loss: float | None = None
    """Mean over this step's samples; in ``on_log``, and where no callback has ``on_step_end``, as logged."""
    learning_rate: float | None = None
    """That this step's update has used."""
    grad_norm: float | None = None
    """Total L2 norm before clipping."""
    elapsed_time: float | None = None
    """Seconds that this step has taken; on one rank."""
    overall_throughput: float | None = None
    """Tokens a second on all ranks, as logged."""
    cuda_mem_allocated: float | None = None
    """GiB; on one rank."""

    batch_metrics: dict[str, Any] = field(default_factory=dict)
    """From the update on: ``total_samples`` of this step on all ranks, ``grad_accum_steps``."""
    val_metrics: dict[str, Any] = field(default_factory=dict)
    """Of this step's evaluations; the loss of the newest one is ``val_loss``, too."""
    checkpoint_path: str | None = None
    """Of this step's checkpoint, from ``on_save`` on."""

    output_dir: str = ""
    model_name_or_path: str = ""
    """As a Hugging Face model's configuration says it."""
    max_epochs: int = 0
    world_size: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
