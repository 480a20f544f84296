"""KempnerForge's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

DIALECT = "kempnerforge"
AT_TRAIN_BEGIN = "on_train_begin"
MISSPELT = ("on_step_ended", "on_step_end")
"""Of a handler, and what is meant."""
CALLED = [("on_eval_end", "(metrics, step)")]
"""Handlers, and how each is called."""
SHIPPED = "TrainingHook"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    from kempnerforge.training.hooks import TrainingHook

    return TrainingHook
