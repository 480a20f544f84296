"""Tensors and states of a checkpoint, without a model to load them into."""

from __future__ import annotations

import torch

from dalsegno.checkpoint.format import index, names
from dalsegno.checkpoint.format.index import Index, StoredTensor
from dalsegno.checkpoint.format.layout import StoredFile
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.load import dcp_reader
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.stateful.component import State


def read_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, torch.Tensor]]:
    """Component to name to full tensor, on the CPU, assembled from the shards of all ranks. In one process only.

    Raises:
        DamagedCheckpoint: if a file has content that dalsegno cannot have written.
    """
    stored = Index.read(checkpoint.file(names.INDEX))
    components = sorted({index.split(name)[0] for name in stored.tensors})
    tensors = {
        component: {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.of(component).items()}
        for component in components
    }
    dcp_reader.load(tensors, checkpoint, stored)
    return tensors


def full_tensor(stored: StoredTensor, checkpoint: Checkpoint) -> torch.Tensor:
    """A full tensor from its chunks; each file is open only while its chunk is copied.

    Raises:
        DamagedCheckpoint: if a chunk is not where the index says.
    """
    full = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        box = full
        for dimension, (begin, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
            box = box.narrow(dimension, begin, length)
        whole_chunk = [(0, length) for length in chunk.shape]
        StoredFile(checkpoint.file(chunk.file)).fill(box, chunk.span, stored.dtype, chunk.shape, whole_chunk)
    return full


def saved_states(checkpoint: Checkpoint) -> dict[str, list[State]]:
    """Component to its non-tensor states: one, or one per rank that saved.

    Raises:
        DamagedCheckpoint: if a file has content that dalsegno cannot have written.
    """
    saved = SavedStates(checkpoint)
    return {key: list(saved.all_of(key).states) for key in saved}
