"""Checkpoints: whole or absent, verified before they are used, and never a way for data to run code.

What only looks at them, say a command, must not wait for torch: so these names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .export import Exported, export_model
    from .inspect import read_tensors, saved_states
    from .loading import CALLBACKS, SETTINGS, LoadReport
    from .manager import CheckpointManager
    from .manifest import Checkpoint, Manifest
    from .restoring import load_parts
    from .sharded import ModelState, OptimizerState, Sharded, unwrapped
    from .weights import load_weights, weights_are_at

_HOMES = {
    "export": ("Exported", "export_model"),
    "inspect": ("read_tensors", "saved_states"),
    "loading": ("CALLBACKS", "SETTINGS", "LoadReport"),
    "manager": ("CheckpointManager",),
    "manifest": ("Checkpoint", "Manifest"),
    "restoring": ("load_parts",),
    "sharded": ("ModelState", "OptimizerState", "Sharded", "unwrapped"),
    "weights": ("load_weights", "weights_are_at"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CALLBACKS",
    "SETTINGS",
    "Checkpoint",
    "CheckpointManager",
    "Exported",
    "LoadReport",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "Sharded",
    "export_model",
    "load_parts",
    "load_weights",
    "read_tensors",
    "saved_states",
    "unwrapped",
    "weights_are_at",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = found
        return found
