"""Runs on the simulated accelerator. At the top of a module, so that processes can import them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.callbacks import EMA, NaNChecker
from dalsegno.distributed import accelerator
from support.listeners import Listener
from support.runs import busy_trainer

from .accelerator import KIND, plug_in

ORDERS = (0, 1, 5)
"""In which streams do their work: late, early, by a seed."""


def trainer(output_dir: Path, order: int = 1, frozen: Sequence[str] = (), **changes: Any) -> ds.Trainer:
    """Everything that ``busy_trainer`` does, with averaged weights and a search for NaN."""
    plug_in(order)
    made = busy_trainer(output_dir, max_steps=12, frozen=frozen, use_cpu=False, **changes)
    assert accelerator.current_device().type == KIND
    made.add_callback(EMA(0.9))
    made.add_callback(NaNChecker())
    return made


def background(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir)


def late(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, order=0)


def foreground(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, save_in_background=False)


def in_memory(output_dir: Path) -> ds.Trainer:
    """A memory checkpoint each step, and a frozen layer that is changed in the middle."""

    def change(ctx: Any) -> None:
        if ctx.state.global_step == 6:
            ctx.model.layers[0].weight.data.mul_(1.5)

    made = trainer(output_dir, frozen=["layers.0"], save_steps=8, save_in_memory="Every(steps=1)")
    made.add_callback(Listener({"on_step_end": change}, name="changes the frozen layer"))
    return made


def ddp(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, parallel="ddp")


def fsdp(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, parallel="fsdp")
