"""Hugging Face's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

import dalsegno as ds

DIALECT = "huggingface"
AT_TRAIN_BEGIN = "on_train_begin"
MISSPELT = ("on_step_ended", "on_step_end")
"""Of a handler, and what is meant."""
CALLED = [("on_log", "(args, state, control, model=, ")]
"""Handlers, and how each is called."""
SHIPPED = "TrainerCallback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    return ds.TrainerCallback
