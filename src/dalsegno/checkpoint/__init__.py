"""Checkpoints: whole or absent, verified before they are used, and never a way for data to run code."""

from .inspect import read_tensors, saved_states
from .loading import LoadReport
from .manager import CheckpointManager
from .manifest import Checkpoint, Manifest
from .policy import AnyOf, Best, Entry, Keep, Latest
from .sharded import ModelState, OptimizerState, Sharded, unwrapped

__all__ = [
    "AnyOf",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "Entry",
    "Keep",
    "Latest",
    "LoadReport",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "Sharded",
    "read_tensors",
    "saved_states",
    "unwrapped",
]
