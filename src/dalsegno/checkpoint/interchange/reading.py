"""What the read halves of the formats share: the caller's options, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from .optimizer_contents import OptimizerContents

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the caller knows and the files do not contain.

    Attributes:
        step: finished optimizer steps; None: as saved.
        epoch: passes over the data; None: as saved.
        strip_prefix: removed from the names of the model's tensors; others are left out.
        optimizer: class of the optimizer, as ``module.Class``; None: inferred.
    """

    step: int | None = None
    epoch: float | None = None
    strip_prefix: str = ""
    optimizer: str | None = None

    def renamed(self, name: str) -> str:
        for prefix in _WRAPPERS:
            name = name.removeprefix(prefix)
        return name.removeprefix(self.strip_prefix)

    def model(
        self, tensors: Mapping[str, Any], tied: Mapping[str, str]
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The model's tensors under their names here, each tied one once; and the further names of these.

        Raises:
            ConfigurationError: if no name begins with ``strip_prefix``.
        """
        own = {
            name: each
            for name, each in tensors.items()
            if isinstance(each, torch.Tensor) and self._unwrapped(name).startswith(self.strip_prefix)
        }
        if not own:
            first = ", ".join(list(tensors)[:3]) or "none"
            raise ConfigurationError(
                f"strip_prefix={self.strip_prefix!r}: no tensor has such a name; they are {first} …"
            )
        return (
            {self.renamed(name): each for name, each in own.items() if name not in tied},
            {self.renamed(alias): self.renamed(name) for alias, name in tied.items() if alias in own},
        )

    def _unwrapped(self, name: str) -> str:
        for prefix in _WRAPPERS:
            name = name.removeprefix(prefix)
        return name


def settings_of_optimizer(optimizer: OptimizerContents | None) -> dict[str, Any]:
    """Hyperparameters of Adam as settings of ``TrainingArguments``, for the comparison when a run resumes."""
    if optimizer is None or not optimizer.class_name.endswith(".AdamW"):
        return {}
    first = optimizer.groups[0]
    rate = first.get("initial_lr", first["lr"])
    return {
        "learning_rate": float(rate),
        "weight_decay": float(first["weight_decay"]),
        "adam_beta1": float(first["betas"][0]),
        "adam_beta2": float(first["betas"][1]),
        "adam_epsilon": float(first["eps"]),
    }
