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
from torch.distributed.tensor import DTensor

from dalsegno.distributed.sharded_tensors import local_part

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


def new_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, class_name: str, context: dict[str, Any]
) -> Any:
    """A state of zeros of ``parameter``, in the optimizer's blocks; None if that class is none of its states, or cannot
    have as many elements."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    known: dict[str, Any] = {each.__name__: each for each in (OptimState4bit, OptimState8bit, OptimStateFp8)}
    kind = known.get(class_name.rpartition(".")[2])
    local = local_part(parameter)
    block_size = getattr(optimizer, "block_size", 0)
    if kind is None or not block_size or local.numel() % block_size:
        return None
    signed = {"signed": context["signed"]} if "signed" in context else {}
    state = kind.zeros(local.shape, **signed, block_size=block_size, device=local.device, dtype=local.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        state = DTensor.from_local(
            state, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return state.to(parameter.device)  # offloaded: from_local moves it to the device of the mesh


def _by_row(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows = shape[0]
    return part.view(rows, -1) if part.dim() == 1 < len(shape) and rows and part.numel() % rows == 0 else part


def _checksum_of_table(state: Any) -> str:
    key = (type(state), state.signed)
    if key not in _checksums:
        _checksums[key] = xxhash.xxh3_128_hexdigest(state.qmap.detach().cpu().numpy().tobytes())
    return _checksums[key]
