"""Source: another program's checkpoint, and what the caller knows of it and its files do not contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.export import SHARD_INDEX, SINGLE_FILE
from dalsegno.checkpoint.weights import Weights
from dalsegno.errors import ConfigurationError

from . import pickles
from .run_state import OptimizerContents, Place, RunState

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""
_PICKLED_WEIGHTS = "pytorch_model.bin"
_ADAPTER = "adapter_model.safetensors"
_CALLBACK = "its state has no meaning for a callback here"


@dataclass(frozen=True, slots=True)
class Source:
    """
    Attributes:
        path: folder or file.
        step: finished optimizer steps; None: as saved.
        epoch: passes over the data; None: as saved.
        strip_prefix: removed from the names of the model's tensors; others are left out.
        optimizer: class of the optimizer, as ``module.Class``; None: inferred.
    """

    path: Path
    step: int | None = None
    epoch: float | None = None
    strip_prefix: str = ""
    optimizer: str | None = None

    def load_existing(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Content of the pickled files that exist, by key."""
        return {key: pickles.load(self.path / name) for key, name in names.items() if (self.path / name).is_file()}

    def load_weights(self) -> Mapping[str, Any]:
        """The model's tensors in a folder, as safetensors or else pickled.

        Raises:
            ConfigurationError: if there is no whole model.
        """
        path = self.path
        if (path / SINGLE_FILE).is_file() or (path / SHARD_INDEX).is_file():
            return Weights.open(path).read_all()
        if (path / _PICKLED_WEIGHTS).is_file():
            tensors: Mapping[str, Any] = pickles.load(path / _PICKLED_WEIGHTS)
            return tensors
        if (path / _ADAPTER).is_file():
            raise ConfigurationError(
                f"{path}: contains only the weights of an adapter ({_ADAPTER}), and no whole model; merge the adapter "
                "into its base model first, or begin a new run with the merged weights"
            )
        raise ConfigurationError(
            f"{path}: contains neither {SINGLE_FILE} nor {SHARD_INDEX} nor {_PICKLED_WEIGHTS}; weights that DeepSpeed "
            "or FSDP has sharded are not read: convert them first with that program's own tool"
        )

    def run_state(
        self,
        program: str,
        tensors: Mapping[str, Any],
        *,
        optimizer: tuple[Any, str],
        step: object = None,
        place: Place | None = None,
        schedulers: Sequence[Mapping[str, Any]] = (),
        scaler: Mapping[str, Any] | None = None,
        unknown: Iterable[object] = (),
        callbacks: Iterable[object] = (),
    ) -> RunState:
        """The state that these parts make, as far as the caller has not given others. Raises StateMismatch if
        ``optimizer`` is not an optimizer's state.

        Args:
            program: its name in messages.
            tensors: of the model, by their names there. Values that are not tensors are ignored.
            optimizer: its ``state_dict`` or None, and the part of the source that contains it.
            step: finished steps, if saved; else the optimizer's own count.
            place: position in the data, if saved.
            schedulers: ``state_dict`` of each.
            scaler: the gradient scaler's.
            unknown: names of other parts.
            callbacks: names of callbacks with a state.
        """
        saved, where = optimizer
        contents = (
            OptimizerContents.of_state_dict(saved, self.optimizer, self._renamed, where) if saved is not None else None
        )
        own = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        own = {name: each.detach() for name, each in own.items() if _unwrapped(name).startswith(self.strip_prefix)}
        if not own:
            first = ", ".join(list(tensors)[:3]) or "none"
            raise ConfigurationError(
                f"strip_prefix={self.strip_prefix!r}: no tensor has such a name; they are {first} …"
            )
        tied = pickles.tied_names(own)
        return RunState(
            program=program,
            step=self._step(step, contents),
            model={self._renamed(name): each.contiguous() for name, each in own.items() if name not in tied},
            tied={self._renamed(alias): self._renamed(name) for alias, name in tied.items()},
            optimizer=contents,
            schedulers=schedulers,
            scaler=scaler,
            place=Place.at(self.epoch) if self.epoch is not None else place or Place(),
            settings=_settings(contents),
            left_out={
                **{str(name): "unknown to a run here" for name in unknown},
                **{f"callback {name}": _CALLBACK for name in callbacks},
            },
        )

    def _step(self, saved: object, optimizer: OptimizerContents | None) -> int:
        if self.step is not None:
            return self.step
        if isinstance(saved, torch.Tensor) and saved.numel() == 1:
            return int(saved)
        if type(saved) is int:
            return saved
        counted = 0 if optimizer is None else optimizer.steps()
        if counted is None:
            raise ConfigurationError(f"{self.path}: does not contain the number of finished steps; pass step= (--step)")
        return counted

    def _renamed(self, name: str) -> str:
        return _unwrapped(name).removeprefix(self.strip_prefix)


def _unwrapped(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.removeprefix(prefix)
    return name


def _settings(optimizer: OptimizerContents | None) -> dict[str, Any]:
    """Hyperparameters of AdamW as settings of ``TrainingArguments``, for the comparison when a run resumes."""
    if optimizer is None or not optimizer.class_name.endswith(".AdamW"):
        return {}
    first = optimizer.groups[0]
    return {
        "learning_rate": float(first.get("initial_lr", first["lr"])),
        "weight_decay": float(first["weight_decay"]),
        "adam_beta1": float(first["betas"][0]),
        "adam_beta2": float(first["betas"][1]),
        "adam_epsilon": float(first["eps"]),
    }
