"""Parallel modes of a model: one file each, selected by one argument."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout, data_dimensions
from dalsegno.distributed.modes import (
    DDP,
    FSDP,
    TENSOR,
    Mode,
    Parallelized,
    Pipeline,
    Setting,
    TensorParallel,
    modes_of,
    text_of,
)
from dalsegno.errors import ConfigurationError

from .base import Parallel, WithTrainedLoss, gathered_dtype, has_own_parameters, make_copies_equal
from .ddp import DataParallel
from .fsdp import shard, unit_names
from .fused_backward import FusedBackward
from .pipeline import Pipelined
from .tensor import planned_styles, split_layers
from .torchrun import require_launch

__all__ = ["FusedBackward", "Parallel", "Pipelined", "parallelize"]

_COPIES = FSDP(reshard_after_forward=False)
"""DDP in a composition: ``fully_shard`` over groups of one rank, which average their gradients."""


def parallelize(
    model: nn.Module,
    setting: Setting,
    layout: Layout,
    device: torch.device,
    loss_fn: nn.Module | None = None,
    *,
    bf16: bool = False,
) -> Parallel:
    """Distribute ``model``, which is on ``device``, by the modes of a checked setting; ``auto`` is DDP.

    ``loss_fn``, which computes the loss from the model's output, is distributed too if it has parameters to train.
    ``bf16``: FSDP gathers parameters in bfloat16, if :func:`.base.gathered_dtype` permits.

    With a single rank nothing is distributed, whatever the mode: a script written for many ranks works unchanged.
    """
    modes = modes_of(setting)
    if modes and setting != "auto":
        require_launch(setting)
    if collectives.world_size() == 1:
        modes = ()
    _expect_whole(model, setting, modes)
    pipeline = next((mode for mode in modes if isinstance(mode, Pipeline)), None)
    if pipeline is not None and loss_fn is not None and any(True for _ in loss_fn.parameters()):
        raise ConfigurationError(
            f"loss_fn: {type(loss_fn).__name__} has parameters, and under parallel={pipeline} it runs on the last "
            "stage only; compute the loss in the model's forward"
        )
    trained_loss = loss_fn if loss_fn is not None and has_own_parameters(loss_fn, model, modes) else None
    parallel = _spread(model, modes, layout, device, bf16)
    if trained_loss is None:
        return parallel
    return WithTrainedLoss(parallel, _spread_loss(trained_loss, modes, layout, device, bf16))


def _expect_whole(model: nn.Module, setting: Setting, modes: Sequence[Mode]) -> None:
    """Raises ConfigurationError if the user has spread a model that these modes would spread again."""
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    if not meshes or not modes or isinstance(modes[0], Parallelized):
        return
    is_over_all = isinstance(model, FSDPModule) and all(mesh.size() == collectives.world_size() for mesh in meshes)
    if is_over_all and len(modes) == 1 and isinstance(modes[0], FSDP):
        return
    raise ConfigurationError(
        f"parallel={text_of(setting)!r}: the model is sharded already, over {', '.join(map(str, meshes))}; pass "
        "parallel='none' if each rank reads its own data, as under fully_shard, else Parallelized(mesh, data=…), which "
        "names the dimensions over which the data are split"
    )


def _spread(model: nn.Module, modes: Sequence[Mode], layout: Layout, device: torch.device, bf16: bool) -> Parallel:
    tensor = next((mode for mode in modes if isinstance(mode, TensorParallel)), None)
    pipeline = next((mode for mode in modes if isinstance(mode, Pipeline)), None)
    sharding = next((mode for mode in modes if isinstance(mode, FSDP)), None)
    if sharding is None and any(isinstance(mode, DDP) for mode in modes):
        sharding = _COPIES
    mesh = layout.mesh
    if not modes or isinstance(modes[0], Parallelized):
        return Parallel(model)
    if mesh is None:
        return DataParallel(model, device)
    dtype = gathered_dtype(model, modes, bf16=bf16)
    if pipeline is not None:
        return Pipelined(model, pipeline, mesh, device, sharding, tensor, dtype)
    return Parallel(model, partial(_distribute, model, mesh, tensor, sharding, dtype))


def _distribute(
    model: nn.Module, mesh: DeviceMesh, tensor: TensorParallel | None, sharding: FSDP | None, dtype: torch.dtype | None
) -> None:
    """Split layers, then shard the model over the data ranks. One that is sharded already is used as it is."""
    if isinstance(model, FSDPModule):
        return
    make_copies_equal(model)
    if tensor is not None:
        split_layers(model, planned_styles(model, tensor, mesh[TENSOR]), mesh[TENSOR])
    if sharding is not None:
        data = mesh[tuple(data_dimensions(mesh.mesh_dim_names or ()))]
        shard(model, unit_names(model, sharding), sharding, data, dtype)


def _spread_loss(
    loss_fn: nn.Module, modes: Sequence[Mode], layout: Layout, device: torch.device, bf16: bool
) -> Parallel:
    """Over the data ranks only: ranks that read the same data compute the same."""
    is_spread = all(isinstance(each, DTensor) for each in loss_fn.parameters())
    if modes and isinstance(modes[0], Parallelized) and layout.data_size > 1 and not is_spread:
        raise ConfigurationError(
            f"loss_fn: {type(loss_fn).__name__} has parameters of its own, whose gradients nothing averages over the "
            "data ranks; spread it too, as you spread the model"
        )
    sharding = [mode for mode in modes if not isinstance(mode, TensorParallel)]
    return _spread(loss_fn, sharding, layout, device, bf16)
