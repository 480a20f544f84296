"""OLMo-core's dialect, for the tests that are the same for all."""

from __future__ import annotations

from typing import Any

from dalsegno.interop.olmo_core import Callback

DIALECT = "olmo_core"
AT_TRAIN_BEGIN = "pre_train"
MISSPELT = ("post_train_batches", "post_train_batch")
"""Of a handler, and what is meant."""
CALLED = [("log_metrics", "(step, logged)")]
"""Handlers, and how each is called."""
SHIPPED = "Callback"
"""Name of the base class that dalsegno has of it."""


def base() -> Any:
    return Callback
