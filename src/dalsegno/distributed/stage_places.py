"""Which ranks store each tensor of a model that is cut into pipeline stages.

Every rank keeps the whole model: its names, shapes and dtypes. Parameters and buffers of other stages are on the meta
device here; their values are on other ranks. This registry has the ranks that store each tensor. Code that measures or
saves a model looks it up, so that it covers all stages and never takes a meta tensor for weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a tensor is stored."""

    meshes: tuple[tuple[int, ...], tuple[int, ...]]
    """The ranks of the meshes that each hold the whole tensor, in row-major order, and the shape (meshes, ``*mesh
    shape``). One mesh for each rank of the pipeline that stores the tensor: several for a tied one."""
    placements: tuple[Placement, ...]
    """Placement on each dimension of a mesh."""
    shards: tuple[ProcessGroup, ...]
    """This rank's process groups over which the tensor is sharded, in its stage."""
    pipeline: ProcessGroup
    """The ranks that have this rank's place in the other stages."""
    copies: ProcessGroup | None
    """The ranks that run the same stage, and have a copy of the tensor if it is not sharded; None if there is no
    other."""
    counts: bool
    """Whether this rank's part counts in a sum over the ranks; not if it is elsewhere, or a tied tensor's copy."""
    device: torch.device
    """This rank's device."""

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """This rank's process groups over which measurements of the tensor are summed."""
        return (*self.shards, self.pipeline)


_places: WeakIdKeyDictionary = WeakIdKeyDictionary()


def place_of(tensor: Tensor) -> StagePlace | None:
    """Return where a tensor of a cut model is; None for any other."""
    if not _places.data:  # a look-up takes a microsecond, and most models are not cut
        return None
    place: StagePlace | None = _places.get(tensor)  # type: ignore[no-untyped-call]
    return place


def set_place(tensor: Tensor | None, place: StagePlace | None) -> None:
    """Record where ``tensor`` is; None: as in a model that is not cut."""
    if tensor is not None and place is not None:
        _places[tensor] = place


def like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Record that ``tensor``, such as an average of the parameter, is where ``parameter`` is; returns ``tensor``."""
    if _places.data:
        set_place(tensor, place_of(parameter))
    return tensor


def is_on_other_stage(tensor: Tensor) -> bool:
    """Whether other ranks store the tensor, and this one only knows its shape."""
    return tensor.is_meta and place_of(tensor) is not None


def is_cut(model: nn.Module) -> bool:
    return any(place_of(parameter) is not None for parameter in model.parameters())


def expect_whole(model: nn.Module, who: str, why: str) -> None:
    """Refuse a model that is cut into stages."""
    if is_cut(model):
        raise ConfigurationError(
            f"{who}: does not work under a pipeline, {why}; remove it, or use another parallel mode"
        )
