"""FSDP2: parameters, gradients and optimizer state sharded over the ranks (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dalsegno.distributed.blocks import matching_names, unshared
from dalsegno.distributed.modes import FSDP


def shard(
    model: nn.Module,
    units: Sequence[str] | None,
    mode: FSDP,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    reshard_after_forward: bool | int | None = None,
) -> None:
    """Apply ``fully_shard`` to the units (None: the blocks) of ``model``, and to the rest. A part that shares a
    parameter with another one belongs to the rest.

    Args:
        mesh: over which the data are split; of two dimensions for HSDP.
        dtype: of gathered parameters, unless ``mode`` has an ``mp_policy``; gradients are then reduced in float32.
            None: that of the parameters.
        reshard_after_forward: unless ``mode`` has it.
    """
    if mode.reshard_after_forward is not None:
        reshard_after_forward = mode.reshard_after_forward
    policy, of_root = _policies(mode, dtype)
    for unit in unshared(model, units):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=of_root, reshard_after_forward=reshard_after_forward)


def _policies(mode: FSDP, dtype: torch.dtype | None) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Mixed precision of the units, and of the root."""
    if mode.mp_policy is not None or dtype is None:
        policy = mode.mp_policy or MixedPrecisionPolicy()
        return policy, policy
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # The root's inputs are the batch, with targets that must not be rounded; autocast casts what its layers multiply.
    return policy, replace(policy, cast_forward_inputs=False)


def unit_names(model: nn.Module, mode: FSDP) -> list[str] | None:
    """Names of the modules that the user chose; None: the choice is ours."""
    if mode.units is None:
        return None
    units = [mode.units] if isinstance(mode.units, str) else mode.units
    found = [name for each in units for name in matching_names(model, each, f"{type(mode).__name__}(units=…)")]
    return [*dict.fromkeys(found)]
