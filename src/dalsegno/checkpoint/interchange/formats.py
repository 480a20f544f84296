"""FORMATS: the programs whose checkpoints can be imported and exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from . import accelerate_folder, dcp_folder, huggingface, lightning_file, torch_file
from .reading import ReadOptions
from .run_state import RunState
from .writing import WriteOptions, Written


class Format(Protocol):
    """A module with the layout of a program's files."""

    PROGRAM: str
    """Its name in messages."""

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is such a checkpoint, by names of files only."""

    def read(self, path: Path, options: ReadOptions) -> RunState:
        """Read everything that a run here can use."""

    def write(self, run: RunState, target: Path, options: WriteOptions) -> Written:
        """Write what the program resumes from to ``target``, which does not exist; what has no place there."""


FORMATS: Mapping[str, Format] = {
    "hf": huggingface,
    "accelerate": accelerate_folder,
    "dcp": dcp_folder,
    "lightning": lightning_file,
    "torch": torch_file,
}
"""By key; in the order in which a folder is recognized."""
