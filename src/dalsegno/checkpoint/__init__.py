"""Checkpoints: complete or absent, verified before use; loading one never runs code.

Each package imports only from those above it::

    format/               names and content of the files: manifest, index, sidecars, tensors
    state/                model and optimizer as tensors by FQN and a small rest
    save/   load/         one checkpoint to disk, and back into a run
    inspect/              list, read and compare checkpoints, without a model
    interchange/ remote/  checkpoints and weights of other programs; a copy of the run at a URL
    manager, memory       the checkpoints of a run on disk, and in shared memory: what the training engine uses

A save: :meth:`CheckpointManager.save_async` → ``save/snapshot`` captures the states that ``save/planning`` assigned to
this rank → ``save/staging`` copies tensors into buffers laid out as the files → ``save/async_save`` writes them on a
thread → ``format/checkpoint_dir`` writes the manifest and publishes by a rename → unkept checkpoints are deleted.

A load: :meth:`CheckpointManager.find` verifies every byte of the newest checkpoint → :meth:`CheckpointManager.load` →
``load/restore`` compares it with the run and prepares all states, or refuses → ``load/tensor_reader`` reads each rank's
shards into tensors of ``state/model`` and ``state/optimizer`` → ``load/states`` restores all other components from the
sidecars.

Names are imported on first use, so that commands which only read checkpoints need not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .format.keys import CALLBACKS, LOSS, SETTINGS
    from .format.manifest import Checkpoint, Manifest
    from .inspect.contents import read_tensors, saved_states
    from .interchange.adapters import export_adapters
    from .interchange.export import Exported, export_model
    from .interchange.exporting import ExportedRun, export_checkpoint
    from .interchange.importing import Imported, import_checkpoint
    from .interchange.weights import load_weights, weights_are_at
    from .load.restore import load_parts
    from .load.states import LoadReport
    from .manager import CheckpointManager
    from .memory import MemoryCheckpoints
    from .state.callback_tensors import CallbackTensors
    from .state.contract import ShardedState
    from .state.model import ModelState, unwrapped
    from .state.optimizer import OptimizerState

_HOMES = {
    "interchange.adapters": ("export_adapters",),
    "interchange.export": ("Exported", "export_model"),
    "interchange.exporting": ("ExportedRun", "export_checkpoint"),
    "interchange.importing": ("Imported", "import_checkpoint"),
    "state.callback_tensors": ("CallbackTensors",),
    "inspect.contents": ("read_tensors", "saved_states"),
    "format.keys": ("CALLBACKS", "LOSS", "SETTINGS"),
    "load.states": ("LoadReport",),
    "manager": ("CheckpointManager",),
    "memory": ("MemoryCheckpoints",),
    "format.manifest": ("Checkpoint", "Manifest"),
    "load.restore": ("load_parts",),
    "state.contract": ("ShardedState",),
    "state.model": ("ModelState", "unwrapped"),
    "state.optimizer": ("OptimizerState",),
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
    "ExportedRun",
    "Imported",
    "LoadReport",
    "Manifest",
    "MemoryCheckpoints",
    "ModelState",
    "OptimizerState",
    "ShardedState",
    "export_adapters",
    "export_checkpoint",
    "export_model",
    "import_checkpoint",
    "load_parts",
    "load_weights",
    "read_tensors",
    "saved_states",
    "unwrapped",
    "weights_are_at",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
