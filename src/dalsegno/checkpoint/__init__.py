"""Checkpoints: complete or absent, verified before use; loading one never runs code.

Each package imports only from those above it::

    format/               names and content of the files: manifest, index, sidecars, tensors
    state/                model and optimizer as tensors by FQN and a small rest
    save/   load/         one checkpoint to disk, and back into a run
    inspect/              list, read and compare checkpoints, without a model
    export, weights       the model as safetensors: written for other programs, and read from them
    foreign/ remote/      runs of other programs; a copy of the run at a URL
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
    from dalsegno.checkpoint.export import Exported as Exported
    from dalsegno.checkpoint.export import export_adapters as export_adapters
    from dalsegno.checkpoint.export import export_model as export_model
    from dalsegno.checkpoint.foreign.programs import ExportedRun as ExportedRun
    from dalsegno.checkpoint.foreign.programs import Imported as Imported
    from dalsegno.checkpoint.foreign.programs import export_checkpoint as export_checkpoint
    from dalsegno.checkpoint.foreign.programs import import_checkpoint as import_checkpoint
    from dalsegno.checkpoint.weights import load_weights as load_weights
    from dalsegno.checkpoint.weights import weights_are_at as weights_are_at

    from .format.keys import CALLBACKS as CALLBACKS
    from .format.keys import LOSS as LOSS
    from .format.keys import SETTINGS as SETTINGS
    from .format.manifest import Checkpoint as Checkpoint
    from .format.manifest import Manifest as Manifest
    from .inspect.contents import read_tensors as read_tensors
    from .inspect.contents import saved_states as saved_states
    from .load.restore import load_parts as load_parts
    from .load.states import LoadReport as LoadReport
    from .manager import CheckpointManager as CheckpointManager
    from .memory import MemoryCheckpoints as MemoryCheckpoints
    from .state.callback_tensors import CallbackTensors as CallbackTensors
    from .state.contract import ShardedState as ShardedState
    from .state.model import ModelState as ModelState
    from .state.model import unwrapped as unwrapped
    from .state.optimizer import OptimizerState as OptimizerState

_HOMES = {
    "format.keys": ("CALLBACKS", "LOSS", "SETTINGS"),
    "format.manifest": ("Checkpoint", "Manifest"),
    "inspect.contents": ("read_tensors", "saved_states"),
    "export": ("Exported", "export_adapters", "export_model"),
    "foreign.programs": ("ExportedRun", "Imported", "export_checkpoint", "import_checkpoint"),
    "weights": ("load_weights", "weights_are_at"),
    "load.restore": ("load_parts",),
    "load.states": ("LoadReport",),
    "manager": ("CheckpointManager",),
    "memory": ("MemoryCheckpoints",),
    "state.callback_tensors": ("CallbackTensors",),
    "state.contract": ("ShardedState",),
    "state.model": ("ModelState", "unwrapped"),
    "state.optimizer": ("OptimizerState",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
