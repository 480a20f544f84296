"""Tensors and states of a checkpoint, without a model to load them into."""

from __future__ import annotations

import torch

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.format.names import component_and_name
from dalsegno.checkpoint.format.stored_tensors import ChunkReader
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.stateful.component import State


def read_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    """Component to name to full tensor, on the CPU, assembled from the shards of all ranks.

    Raises:
        DamagedCheckpoint: if a file has content that dalsegno cannot have written.
    """
    reader = ChunkReader(checkpoint)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, stored in Index.of_checkpoint(checkpoint).tensors.items():
        component, name = component_and_name(full_name)
        tensors.setdefault(component, {})[name] = reader.full_tensor(stored)
    return dict(sorted(tensors.items()))


def saved_states(checkpoint: Checkpoint) -> dict[str, list[State]]:
    """Component to its non-tensor states: one, or one per rank that saved.

    Raises:
        DamagedCheckpoint: if a file has content that dalsegno cannot have written.
    """
    saved = SavedStates(checkpoint)
    return {key: list(saved.all_of(key).states) for key in saved}
