"""training_hub's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

DIALECT = "training_hub"
AT_TRAIN_BEGIN = "on_train_begin"
MISSPELT = ("on_evaluated", "on_evaluate")
"""Of a handler, and what is meant."""
CALLED = [("on_save", "(context)")]
"""Handlers, and how each is called."""
SHIPPED = "TrainingHubCallback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    from training_hub import TrainingHubCallback

    return TrainingHubCallback
