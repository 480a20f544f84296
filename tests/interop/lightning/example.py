"""Lightning's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

from dalsegno.interop.lightning import Callback

DIALECT = "lightning"
AT_TRAIN_BEGIN = "on_train_start"
MISSPELT = ("on_train_batch_ends", "on_train_batch_end")
"""Of a handler, and what is meant."""
CALLED = [
    ("on_before_optimizer_step", "(trainer, pl_module, optimizer)"),
    ("on_save_checkpoint", "(trainer, pl_module, checkpoint)"),
]
"""Handlers, and how each is called."""
SHIPPED = "Callback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    return Callback
