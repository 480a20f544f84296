"""What lies in a checkpoint, without a model to load it into."""

from __future__ import annotations

import torch

from dalsegno.checkpoint.format import index
from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.load import dcp_reader
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.stateful.component import State


def read_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    """Component to name to tensor, whole, on the CPU: all that a job's ranks hold in shards. In one process only.

    Raises:
        DamagedCheckpoint: if a file holds what dalsegno cannot have written.
    """
    stored = Index.read(checkpoint.file(index.FILE_NAME))
    components = sorted({index.split(name)[0] for name in stored.tensors})
    tensors = {
        component: {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.of(component).items()}
        for component in components
    }
    dcp_reader.load(tensors, checkpoint, stored)
    return tensors


def saved_states(checkpoint: Checkpoint) -> dict[str, list[State]]:
    """The rest of each component's state, under its key: one state, or one for each rank that saved.

    Raises:
        DamagedCheckpoint: if a file holds what dalsegno cannot have written.
    """
    saved = SavedStates(checkpoint)
    return {key: list(saved.all_of(key).states) for key in saved}
