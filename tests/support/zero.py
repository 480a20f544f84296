"""What only rank 0 does."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from support.listeners import Trace
from support.models import Line
from support.small import small_trainer


class OnZero(Trace):
    """A counter that only rank 0 keeps."""

    ranks = "zero"


def count_on_ranks(output_dir: Path, steps: int) -> int:
    """Train up to ``steps``; what this rank has counted."""
    counter = OnZero()
    small_trainer(output_dir, counter, max_steps=steps, save_steps=2, parallel="ddp").train()
    return counter.steps


def warnings_about_broken_weights(output_dir: Path) -> list[str]:
    """Begin with a weight that is NaN; what this rank logs about it."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    model = Line()
    torch.nn.init.constant_(model.layer.bias, float("nan"))
    small_trainer(output_dir, model=model, max_steps=1, parallel="ddp").train()
    return [text for text in warnings if "contain NaN" in text]
