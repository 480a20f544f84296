"""RunState: a training run's state in the terms that the files of all programs share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from .optimizer_contents import OptimizerContents


@dataclass(frozen=True, slots=True)
class Place:
    """Position in the data. Within the epoch it is known as a fraction, as a number of micro-batches, or not at all."""

    epoch: int = 0
    """Finished epochs."""
    fraction: float | None = None
    """Consumed micro-batches of the epoch, as a fraction of all."""
    microbatches: int | None = None
    """Consumed micro-batches of the epoch, on each rank."""

    @classmethod
    def at(cls, position: float) -> Place:
        """Passes over the data, such as 1.25."""
        finished = math.floor(position + 1e-9)
        return cls(finished, max(0.0, position - finished))

    @property
    def is_known(self) -> bool:
        """Whether the position within the epoch is known."""
        return self.fraction is not None or self.microbatches is not None

    @property
    def position(self) -> float:
        """Passes over the data, as far as known."""
        return self.epoch + (self.fraction or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run after ``step`` optimizer steps. Tensors are full tensors on the CPU.

    Attributes:
        program: the program whose files these are.
        step: finished optimizer steps.
        model: tensors by FQN, each tied tensor once.
        tied: further name of a tied tensor to its name in ``model``, as far as known.
        schedulers: ``state_dict`` of each learning rate schedule.
        random: of each rank, the states ``python``, ``numpy``, ``torch`` and ``cuda`` (a list).
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
    tokens_seen: int = 0
    total_flos: float = 0.0
    best_metric: float | None = None
    best_step: int = 0
    records: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def state_dict(self, prefix: str) -> dict[str, torch.Tensor]:
        """The model's tensors under all their names; tied ones are the same tensor."""
        names = {**{name: name for name in self.model}, **self.tied}
        return {f"{prefix}{name}": self.model[source] for name, source in names.items()}

    def expect_optimizer(self, program: str) -> OptimizerContents:
        """Raises ConfigurationError if there is none."""
        if self.optimizer is None:
            raise ConfigurationError(f"the checkpoint contains no optimizer, without which {program} cannot resume")
        return self.optimizer

    def further_schedulers(self) -> dict[str, str]:
        """The reason for which each schedule after the first is left out."""
        return {f"scheduler.{number}": "there is a place for one" for number in range(1, len(self.schedulers))}
