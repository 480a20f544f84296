"""Dense tensors, which a checkpoint stores as they are."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dalsegno.checkpoint.format.layout import is_plain
from dalsegno.distributed.stage_places import is_on_other_stage

_TENSORS = (torch.Tensor, nn.Parameter)  # a subclass may hide its data


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that can be saved as it is, here or by the rank that stores it."""
    memory = value._local_tensor if type(value) is DTensor else value
    return type(memory) in _TENSORS and (is_plain(memory) or is_on_other_stage(value))


def is_sharded(value: object, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's value is sharded like its parameter.

    Its shape tells at once that a step counter is not, of which there may be thousands.
    """
    return isinstance(value, torch.Tensor) and is_shaped_like(value, parameter) and is_dense(value)


def is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's value has an element for each of its parameter's."""
    return isinstance(value, DTensor) or (value.dim() > 0 and value.shape == parameter.shape)
