"""A program's layout of files; and a source: such files, and what the caller knows that they do not contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        tied = _tied_names(own)
        return RunState(
            program=program,
            step=self._step(step, contents),
            model={self._renamed(name): each.contiguous() for name, each in own.items() if name not in tied},
            tied={self._renamed(alias): self._renamed(name) for alias, name in tied.items()},
            optimizer=contents,
            schedulers=schedulers,
            place=Place.at(self.epoch) if self.epoch is not None else place or Place(),
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


def _tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further name to first name of each tensor that has several: they are one place in memory."""
    first: dict[object, str] = {}
    names = {
        name: first.setdefault((each.data_ptr(), each.dtype, each.shape, each.stride()), name)
        for name, each in tensors.items()
        if each.numel()
    }
    return {name: other for name, other in names.items() if name != other}


Files = tuple[Sequence[Path], Mapping[str, str]]
"""Written files, and what has no place in them, with the reason."""


@dataclass(frozen=True, slots=True)
class Program:
    """The layout of a program's files.

    Attributes:
        name: in messages.
        is_at: whether a path is such a checkpoint, by names of files only.
        read: read everything that a run here can use.
        write: write what the program resumes from, with a prefix that is added to the names of tensors. The target does
            not exist, or contains the model as safetensors.
        has_safetensors: whether the model is in files of safetensors, as ``export_model`` writes them.
    """

    name: str
    is_at: Callable[[Path], bool]
    read: Callable[[Source], RunState]
    write: Callable[[RunState, Path, str], Files]
    has_safetensors: bool = False
