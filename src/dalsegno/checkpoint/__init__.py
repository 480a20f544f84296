"""Checkpoints: whole or absent, verified before they are used, and never a way for data to run code.

What only looks at them, say a command, must not wait for torch: so these names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .export import Exported, export_model
    from .inspect import read_tensors, saved_states
    from .loading import SETTINGS, LoadReport
    from .manager import CheckpointManager
    from .manifest import Checkpoint, Manifest
    from .sharded import ModelState, OptimizerState, Sharded, unwrapped

_HOMES = {
    "export": ("Exported", "export_model"),
    "inspect": ("read_tensors", "saved_states"),
    "loading": ("SETTINGS", "LoadReport"),
    "manager": ("CheckpointManager",),
    "manifest": ("Checkpoint", "Manifest"),
    "sharded": ("ModelState", "OptimizerState", "Sharded", "unwrapped"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
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
    "read_tensors",
    "saved_states",
    "unwrapped",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = found
        return found
