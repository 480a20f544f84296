"""Somebody who trains in a folder that may be taken."""

from __future__ import annotations

from pathlib import Path

from support.small import small_trainer


def intruder(output_dir: Path) -> None:
    small_trainer(output_dir, max_steps=1).train()
