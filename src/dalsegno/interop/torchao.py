"""torchao: states of its low-bit optimizers, taken apart for :mod:`dalsegno.checkpoint.wrapped`.

torchao's own parts of a state are flat, and one is the table of the values that its codes stand for. Here the parts of
a matrix have a row for each of its rows, if no block crosses rows: so they can be sharded as the matrix is. The table
belongs to the class, and the context has its checksum. All other tensors of torchao are taken apart by torch's
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

_STATES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
_checksums: dict[tuple[type, bool], str] = {}  # of a class's table; on a device, reading it takes a sync


def take_apart(tensor: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], object] | None:
    """Parts of a state, which share its memory, and what they do not contain; None for another class."""
    if type(tensor).__name__ not in _STATES:
        return None
    state: Any = tensor
    context = {"block_size": state.block_size}
    if hasattr(state, "qmap"):
        context |= {"signed": state.signed, "table": _checksum_of_table(state)}
    return {".codes": _by_row(state.codes, tensor.shape), ".scale": _by_row(state.scale, tensor.shape)}, context


def hidden_tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """None: a module of torchao has its tensors in its state dict."""
    return {}


def _by_row(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows = shape[0]
    return part.view(rows, -1) if part.dim() == 1 < len(shape) and rows and part.numel() % rows == 0 else part


def _checksum_of_table(state: Any) -> str:
    key = (type(state), state.signed)
    if key not in _checksums:
        _checksums[key] = xxhash.xxh3_128_hexdigest(state.qmap.detach().cpu().numpy().tobytes())
    return _checksums[key]
