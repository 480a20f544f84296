"""Checkpoints: complete or absent, verified before use; loading one never runs code.

The files: ``names``, ``manifest``, ``index`` (sharded tensors, cut as ``sharding`` says), ``tensor_files``, and
``sidecar`` (all other state, encoded by ``codec``). What is saved: ``model_state`` and ``optimizer_state``, which keep
``contract``. ``listing``, ``json_view`` and ``difference`` read checkpoints without a model. ``export`` and ``weights``
write and read the model as safetensors; ``foreign/`` and ``remote/`` have runs of other programs, and a copy of the run
at a URL. ``manager`` and ``in_memory``, the checkpoints of a run on disk and in shared memory, serve the training
engine.

A save: :meth:`CheckpointManager.save_async` → ``snapshot`` encodes the states, and has ``plan`` assign the tensors to
ranks → ``staging`` copies them into buffers laid out as the files → ``async_save`` has ``file_writing`` write them on a
thread, and link to those that are unchanged → ``checkpoint_dir`` writes the manifest and publishes by a rename → unkept
checkpoints are deleted.

A load: :meth:`CheckpointManager.find` verifies every byte of the newest checkpoint → :meth:`CheckpointManager.load` →
``restore`` compares it with the run and prepares all states, or refuses → ``tensor_reader`` reads each rank's shards
into tensors of ``model_state`` and ``optimizer_state`` → ``restore`` loads all other components from the sidecars.

What reads a checkpoint raises DamagedCheckpoint for a file that is missing, or has content that dalsegno cannot have
written, and OSError for one that cannot be read, which is not damage. What captures a state raises CannotSave, and what
loads one StateMismatch, before anything is changed.

Names are imported on first use, so that commands which only read checkpoints need not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.checkpoint.contract import CallbackTensors as CallbackTensors
    from dalsegno.checkpoint.contract import ShardedState as ShardedState
    from dalsegno.checkpoint.export import Exported as Exported
    from dalsegno.checkpoint.export import export_adapters as export_adapters
    from dalsegno.checkpoint.export import export_model as export_model
    from dalsegno.checkpoint.foreign.programs import ExportedRun as ExportedRun
    from dalsegno.checkpoint.foreign.programs import Imported as Imported
    from dalsegno.checkpoint.foreign.programs import export_checkpoint as export_checkpoint
    from dalsegno.checkpoint.foreign.programs import import_checkpoint as import_checkpoint
    from dalsegno.checkpoint.in_memory import MemoryCheckpoints as MemoryCheckpoints
    from dalsegno.checkpoint.manifest import Checkpoint as Checkpoint
    from dalsegno.checkpoint.manifest import Manifest as Manifest
    from dalsegno.checkpoint.model_state import ModelState as ModelState
    from dalsegno.checkpoint.model_state import unwrapped as unwrapped
    from dalsegno.checkpoint.names import CALLBACKS as CALLBACKS
    from dalsegno.checkpoint.names import LOSS as LOSS
    from dalsegno.checkpoint.names import SETTINGS as SETTINGS
    from dalsegno.checkpoint.optimizer_state import OptimizerState as OptimizerState
    from dalsegno.checkpoint.restore import LoadReport as LoadReport
    from dalsegno.checkpoint.restore import load_parts as load_parts
    from dalsegno.checkpoint.sidecar import saved_states as saved_states
    from dalsegno.checkpoint.tensor_reader import read_tensors as read_tensors
    from dalsegno.checkpoint.weights import load_weights as load_weights
    from dalsegno.checkpoint.weights import weights_are_at as weights_are_at

    from .manager import CheckpointManager as CheckpointManager
else:
    __getattr__, __dir__ = lazy_exports(__name__)
