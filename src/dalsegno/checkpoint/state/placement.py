"""Placement of loaded optimizer state: on its parameter's device and mesh, in the dtype that was saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dalsegno.checkpoint.format.stored_tensors import StoredTensor

Cast = tuple[torch.dtype, torch.dtype]
"""From dtype, to dtype."""

Moved = dict[tuple[int, torch.device], torch.Tensor]
"""Tensors on a device, by the ``id`` of the saved one."""


def like(
    parameter: torch.Tensor, stored: StoredTensor, cast: Cast | None, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """An empty tensor to load ``stored`` into; sharded like ``parameter`` if the shapes are equal, else replicated.

    ``strides``: of the saved tensor, if they were not its parameter's.
    """
    dtype = cast[1] if cast is not None and stored.dtype == cast[0] else stored.dtype
    if strides is not None and not isinstance(parameter, DTensor):
        return torch.empty_strided(stored.shape, strides, dtype=dtype, device=parameter.device)
    if parameter.shape == stored.shape:
        return torch.empty_like(parameter, dtype=dtype).detach()
    local = torch.empty(stored.shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def cast_as(value: Any, cast: Cast | None) -> Any:
    """Cast a tensor of its parameter's former dtype to the new one. Scalars, such as step counters, keep theirs."""
    if cast is None or not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype != cast[0]:
        return value
    return value.to(cast[1])


def placed_like(value: Any, here: Any) -> Any:
    """Move a hyperparameter that is a tensor, such as the learning rate, to the device of the one that it replaces."""
    if isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor):
        return value.to(here.device)
    return value


def exactly(saved: Any, loaded: Any, moved: Moved) -> Any:
    """``saved``, unconverted, on the device where ``load_state_dict`` put it.

    ``moved``: what each tensor became, which it is under all of its names.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return moved.setdefault((id(saved), loaded.device), saved.to(loaded.device))
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: exactly(value, loaded.get(key), moved) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)([exactly(*pair, moved) for pair in zip(saved, loaded, strict=True)])
    return saved
