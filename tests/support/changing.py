"""A run whose ranks change. At the top of a module, so that ranks can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dalsegno import ranks
from dalsegno.changes import Change
from support.listeners import Listener
from support.small import Line, small_trainer


def train_on_ranks(output_dir: Path, batch_size: int, max_steps: int) -> list[Change]:
    """What has changed since the leg before, in the eyes of this rank."""
    changes: list[Change] = []

    def note(ctx: Any) -> None:
        changes.extend(ctx.report.changes)

    small_trainer(
        output_dir,
        Listener({"on_load": note}),
        model=Line(),
        per_device_train_batch_size=batch_size,
        max_steps=max_steps,
        save_steps=2,
        lr_scheduler_type="constant",
        parallel="ddp" if ranks.world_size() > 1 else "none",
    ).train()
    return changes
