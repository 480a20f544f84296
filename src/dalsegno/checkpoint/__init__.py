"""Checkpoints: whole or absent, verified before they are used, and never a way for data to run code.

What only looks at them, say a command, must not wait for torch: so these names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.lazy import handed_out

if TYPE_CHECKING:
    from .export import Exported, export_model
    from .held import HeldTensors
    from .inspect import read_tensors, saved_states
    from .keys import CALLBACKS, LOSS, SETTINGS
    from .loading import LoadReport
    from .manager import CheckpointManager
    from .manifest import Checkpoint, Manifest
    from .restoring import load_parts
    from .sharded import ModelState, OptimizerState, Sharded, unwrapped
    from .weights import load_weights, weights_are_at

_HOMES = {
    "export": ("Exported", "export_model"),
    "held": ("HeldTensors",),
    "inspect": ("read_tensors", "saved_states"),
    "keys": ("CALLBACKS", "LOSS", "SETTINGS"),
    "loading": ("LoadReport",),
    "manager": ("CheckpointManager",),
    "manifest": ("Checkpoint", "Manifest"),
    "restoring": ("load_parts",),
    "sharded": ("ModelState", "OptimizerState", "Sharded", "unwrapped"),
    "weights": ("load_weights", "weights_are_at"),
}

__all__ = [
    "CALLBACKS",
    "LOSS",
    "SETTINGS",
    "Checkpoint",
    "CheckpointManager",
    "Exported",
    "HeldTensors",
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
    __getattr__, __dir__ = handed_out(__name__, _HOMES)
