"""Dtypes of forward passes, and of the parameters that FSDP gathers for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .modes import FSDP, Mode


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """Return the dtype that the forward pass is cast to; None: the dtype of the model's weights."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else None


def gathered_dtype(model: nn.Module, modes: Sequence[Mode], *, bf16: bool) -> torch.dtype | None:
    """Return the dtype in which FSDP gathers parameters, if the user gave no ``mp_policy``; None: their own.

    bfloat16 under ``bf16``, since autocast would cast them after they were gathered in float32, in twice the traffic
    and memory. Not for a model with batch normalization: its running statistics are float32, and the kernels do not mix
    dtypes.
    """
    gathers = any(isinstance(mode, FSDP) and mode.mp_policy is None for mode in modes)
    has_statistics = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return torch.bfloat16 if bf16 and gathers and not has_statistics else None
