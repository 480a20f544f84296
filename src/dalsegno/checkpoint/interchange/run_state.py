"""RunState: a training run's state in the terms that the formats of all programs share.

The read half of a format makes one; importing turns it into a checkpoint. Exporting makes one of a checkpoint, and the
write half of a format puts it into that program's files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .optimizer_contents import OptimizerContents


@dataclass(frozen=True, slots=True)
class Place:
    """Position in the data. Within the epoch it is known by one of the next three, or unknown."""

    epoch: int = 0
    """Finished epochs."""
    fraction: float | None = None
    """Micro-batches of the epoch that are consumed, as a fraction of all of them."""
    samples: int | None = None
    """Samples of the epoch that are consumed, on all ranks."""
    microbatches: int | None = None
    """Micro-batches of the epoch that are consumed, on each rank."""
    batch: int | None = None
    """Samples in a micro-batch, on all ranks."""

    @classmethod
    def at(cls, epoch: float, batch: int | None = None) -> Place:
        """``epoch`` as a number with the fraction of the current one."""
        finished = math.floor(epoch + 1e-9)
        return cls(finished, max(0.0, epoch - finished), batch=batch)

    @property
    def is_known(self) -> bool:
        """Whether the position within the epoch is known."""
        return not self.fraction is self.samples is self.microbatches is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run after ``step`` optimizer steps. Tensors are full tensors on the CPU.

    Attributes:
        program: the program whose files these are.
        step: finished optimizer steps.
        epoch: passes over the data, including the fraction of the current one; None if unknown.
        model: tensors by FQN, each tied tensor once.
        tied: further name of a tied tensor to its name in ``model``, as far as known.
        schedulers: ``state_dict`` of each learning rate schedule.
        random: of each rank, the states ``python``, ``numpy``, ``torch`` and ``cuda`` (a list).
        place: position in the data.
        records: of the log, with ``global_step`` and ``epoch``.
        settings: of the run, by their names in ``TrainingArguments``.
        left_out: parts that are missing in the files, or have no place in a run here, and why.
    """

    program: str
    step: int
    model: Mapping[str, torch.Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: OptimizerContents | None = None
    schedulers: Sequence[Mapping[str, Any]] = ()
    scaler: Mapping[str, Any] | None = None
    random: Sequence[Mapping[str, Any]] = ()
    place: Place = Place()
    epoch: float | None = None
    samples_seen: int = 0
    tokens_seen: int = 0
    total_flos: float = 0.0
    best_metric: float | None = None
    best_step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
