"""Checkpoints: whole or absent, verified before they are used, and never a way for data to run code.

What only looks at them, say a command, must not wait for torch: so these names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .format.keys import CALLBACKS, LOSS, SETTINGS
    from .format.manifest import Checkpoint, Manifest
    from .inspect.contents import read_tensors, saved_states
    from .interchange.export import Exported, export_model
    from .interchange.weights import load_weights, weights_are_at
    from .load.restore import load_parts
    from .load.states import LoadReport
    from .manager import CheckpointManager
    from .state.callback_tensors import CallbackTensors
    from .state.sharded import ModelState, OptimizerState, ShardedState, unwrapped

_HOMES = {
    "interchange.export": ("Exported", "export_model"),
    "state.callback_tensors": ("CallbackTensors",),
    "inspect.contents": ("read_tensors", "saved_states"),
    "format.keys": ("CALLBACKS", "LOSS", "SETTINGS"),
    "load.states": ("LoadReport",),
    "manager": ("CheckpointManager",),
    "format.manifest": ("Checkpoint", "Manifest"),
    "load.restore": ("load_parts",),
    "state.sharded": ("ModelState", "OptimizerState", "ShardedState", "unwrapped"),
    "interchange.weights": ("load_weights", "weights_are_at"),
}

__all__ = [
    "CALLBACKS",
    "LOSS",
    "SETTINGS",
    "CallbackTensors",
    "Checkpoint",
    "CheckpointManager",
    "Exported",
    "LoadReport",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "ShardedState",
    "export_model",
    "load_parts",
    "load_weights",
    "read_tensors",
    "saved_states",
    "unwrapped",
    "weights_are_at",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
