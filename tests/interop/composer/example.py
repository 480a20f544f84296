"""Composer's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

from dalsegno.interop.composer import Callback

DIALECT = "composer"
AT_TRAIN_BEGIN = "fit_start"
MISSPELT = ("batch_ends", "batch_end")
"""Of a handler, and what is meant."""
CALLED = [("eval_end", "(state, logger)")]
"""Handlers, and how each is called."""
SHIPPED = "Callback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    return Callback
