"""A callback that acts on rank 0 only."""

from __future__ import annotations

from pathlib import Path

from support.listeners import Trace
from support.small import small_trainer


class OnZero(Trace):
    """A counter that only rank 0 keeps."""

    ranks = "zero"


def count_on_ranks(output_dir: Path, steps: int) -> int:
    """Train up to ``steps``; what this rank has counted."""
    counter = OnZero()
    small_trainer(output_dir, counter, max_steps=steps, save_steps=2, parallel="ddp").train()
    return counter.steps
