"""Buffers that a module resizes when it loads, such as those of an observer of ranges, which are empty in a new one."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from dalsegno.checkpoint.format.stored_tensors import StoredTensor


def room_for(model: nn.Module, name: str, saved: StoredTensor) -> torch.Tensor | None:
    """An empty tensor of the saved shape, for the buffer ``name``; None if its module does not take that shape.

    Whether it does is tried with a copy of the module: what :meth:`load_state_dict` does there is its own affair.
    """
    owner, _, end = name.rpartition(".")
    with contextlib.suppress(Exception):  # whatever it raises, it has refused
        probe = copy.deepcopy(model.get_submodule(owner))
        buffer = dict(probe.named_buffers(recurse=False))[end]
        room = torch.zeros(saved.shape, dtype=buffer.dtype, device=buffer.device)
        probe.load_state_dict({end: room}, strict=False)
        if dict(probe.named_buffers(recurse=False))[end].shape == saved.shape:
            return room
    return None
