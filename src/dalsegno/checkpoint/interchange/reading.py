"""What the read halves of the formats share: the caller's options, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import ConfigurationError

from .export import SHARD_INDEX, SINGLE_FILE
from .optimizer_contents import OptimizerContents
from .pickles import Unpickled, tied_in
from .weights import Weights

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""

NOT_THERE = {
    "optimizer": "not saved, so no run can resume from this",
    "random generators": "not saved: seeded anew",
    "place in the data": "not saved: it begins anew; pass --epoch, say 1.25",
    "order of the data": "this run's own: in the current epoch some samples come twice, some never",
    "log": "not saved with the checkpoint",
}
"""Why a part is not imported, if the files do not contain it."""


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

    def step_of(self, saved: object, optimizer: OptimizerContents | None, where: Path) -> int:
        """The step given, or saved, or counted by the optimizer; 0 if there is no optimizer.

        Raises:
            ConfigurationError: if there is none of these.
        """
        if self.step is not None:
            return self.step
        if isinstance(saved, torch.Tensor) and saved.numel() == 1:
            saved = int(saved)
        if type(saved) is int:
            return saved
        counted = 0 if optimizer is None else optimizer.steps()
        if counted is None:
            raise ConfigurationError(f"{where}: does not contain the number of finished steps; pass step= (--step)")
        return counted

    def optimizer_of(self, saved: Any, where: str) -> OptimizerContents | None:
        """The optimizer whose ``state_dict`` is ``saved``; None for None.

        Raises:
            StateMismatch: if it is not one.
            ConfigurationError: if its class is unknown.
        """
        return None if saved is None else OptimizerContents.of_state_dict(saved, self.optimizer, self.renamed, where)

    def renamed(self, name: str) -> str:
        return _unwrapped(name).removeprefix(self.strip_prefix)

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
            if isinstance(each, torch.Tensor) and _unwrapped(name).startswith(self.strip_prefix)
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


def model_in(
    folder: Path, unpickled: Unpickled, options: ReadOptions
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model in ``folder``, as safetensors if it was not requested as the pickle ``weights``."""
    if (pickled := unpickled.content.get("weights")) is not None:
        return options.model(pickled, tied_in(pickled))
    return options.model(Weights.open(folder).read_all(), {})


def has_safetensors(folder: Path) -> bool:
    """Whether ``folder`` contains a model as safetensors."""
    return (folder / SINGLE_FILE).is_file() or (folder / SHARD_INDEX).is_file()


def _unwrapped(name: str) -> str:
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
