"""Dtype of forward passes."""

from __future__ import annotations

import torch


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """Return the dtype that the forward pass is cast to; None: the dtype of the model's weights."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else None
