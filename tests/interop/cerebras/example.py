"""Cerebras's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

DIALECT = "cerebras"
AT_TRAIN_BEGIN = "on_fit_start"
MISSPELT = ("on_train_batch_ends", "on_train_batch_end")
"""Of a handler, and what is meant."""
CALLED = [("on_before_backward", "(trainer, model, outputs)"), ("on_save_checkpoint", "(trainer, state_dict)")]
"""Handlers, and how each is called."""
SHIPPED = "Callback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    from cerebras.modelzoo.trainer.callbacks import Callback

    return Callback
