"""What the write halves of the formats share: the caller's options, and files of ``torch.save``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem

from .optimizer_contents import OptimizerContents
from .run_state import RunState

Written = tuple[Sequence[Path], Mapping[str, str]]
"""Files, and parts that are left out, each with the reason."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """
    Attributes:
        add_prefix: added to the names of the model's tensors.
        export_weights: writes the model into a folder as safetensors, and returns the files.
    """

    add_prefix: str
    export_weights: Callable[[Path], Sequence[Path]]


def save(thing: Any, path: Path) -> Path:
    """``torch.save``; the file appears under its name once it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(thing, partial)
    filesystem.rename(partial, path)
    return path


def state_dict(run: RunState, prefix: str = "") -> dict[str, torch.Tensor]:
    """The model's tensors under all their names; tied ones are the same tensor."""
    names = {**{name: name for name in run.model}, **run.tied}
    return {f"{prefix}{name}": run.model[source] for name, source in names.items()}


def expect_optimizer(run: RunState, program: str) -> OptimizerContents:
    """Raises ConfigurationError if the checkpoint has no optimizer."""
    if run.optimizer is None:
        raise ConfigurationError(f"the checkpoint contains no optimizer, without which {program} cannot resume")
    return run.optimizer


def only_first(run: RunState) -> dict[str, str]:
    """Reasons for which schedules after the first are left out."""
    return {f"scheduler.{number}": "there is a place for one" for number in range(1, len(run.schedulers))}
