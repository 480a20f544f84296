"""The contract of components with sharded tensors: what a save captures, and what a load compares and fills. A
callback's tensors, such as an average of the weights, keep it as they are. And which part of a tensor a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.sharding import Box, Sharding
from dalsegno.checkpoint.tensor_files import is_dense
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import meshes_like
from dalsegno.distributed.sharded_tensors import local_part
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter, place_of
from dalsegno.errors import CannotSave, ConfigurationError, StateMismatch
from dalsegno.stateful.component import State, Stateful, TensorHolder, class_name_of, declared_schema, varying_fields
from dalsegno.stateful.schema import check

Tensors = dict[str, torch.Tensor]
TensorsByComponent = dict[str, Tensors]
FrozenNames = Mapping[str, Collection[str]]
"""By component, the names of its frozen tensors."""


class Captured(NamedTuple):
    """A component's state on this rank: ``tensors`` by name, and the ``rest``. The tensors are neither copied nor
    detached: with thousands of them, either takes longer than all else. Read them under ``torch.no_grad()``. Names,
    ``rest`` and ``frozen``, the names of tensors that training is not expected to change, are the same on every
    rank."""

    tensors: Tensors
    rest: State
    frozen: Collection[str] = frozenset()


class Capturable(Protocol):
    """A component with sharded tensors that can be saved. ``key`` is its directory in a checkpoint."""

    @property
    def key(self) -> str: ...

    @property
    def class_name(self) -> str: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose ``step()`` alone changes these tensors and the parameters; None if there is none."""

    def capture(self) -> Captured: ...


class ShardedState(Capturable, Protocol):
    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        """Raises StateMismatch if a component of this kind cannot have saved ``rest``."""

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        """Differences from the stored state, one line each. ``any_dtype``: another dtype fits too."""

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        """Tensors to load into, for all stored state that fits. State that does not fit stays unchanged."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """``tensors`` to load into, by stored name; call ``commit`` once they are loaded."""

    tensors: Tensors
    commit: Callable[[], object]


class CallbackTensors:
    """Tensors of ``holder`` as a component of a checkpoint. One that is missing there, or has another shape, stays
    unchanged; the holder is notified. ``key`` names a directory: ``callbacks.`` and a name without dots or slashes."""

    optimizer = None  # the holder may change its tensors at any time

    def __init__(self, key: str, holder: TensorHolder, model: nn.Module) -> None:
        name = key.partition(".")[2]
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            raise ConfigurationError(
                f"name={name!r}: a callback with sharded_state has a directory of this name in each checkpoint; "
                "allowed are letters, digits, - and _"
            )
        if isinstance(holder, Stateful):
            raise ConfigurationError(
                f"{key}: it has both sharded_state and state_dict; return all of its state from sharded_state"
            )
        self.key = key
        self._holder = holder
        self._model = model

    @property
    def class_name(self) -> str:
        return class_name_of(self._holder)

    @property
    def state_varies(self) -> tuple[str, ...]:
        return varying_fields(self._holder)

    def capture(self) -> Captured:
        tensors, rest = self._holder.sharded_state(self._model)
        for name, tensor in tensors.items():
            if not is_dense(tensor):
                raise CannotSave(f"{self.key}.{name}: needs a dense tensor or DTensor, not a {type(tensor).__name__}")
        return Captured({name: like_parameter(tensor.detach(), tensor) for name, tensor in tensors.items()}, rest)

    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        form = declared_schema(self._holder)
        if form is not None:
            check(rest, form, where)

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        return []

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        there = stored.of(self.key)
        tensors_to_load = getattr(
            self._holder, "tensors_to_load", lambda model, _: self._holder.sharded_state(model)[0]
        )
        fitting = {
            name: tensor.detach()
            for name, tensor in tensors_to_load(self._model, rest).items()
            if name in there and there[name].shape == tensor.shape
        }
        here = {name: tensor for name, tensor in fitting.items() if not is_on_other_stage(tensor)}
        # All ranks are notified of the same names: other stages load those that are elsewhere.
        return LoadTarget(here, lambda: self._holder.load_sharded_state(fitting.keys(), rest))


# --- the sharding of a tensor: from its DTensor, from its place in a pipeline, or replicated --------------------------


class Shardings:
    """Shardings of tensors, each computed once, since many tensors are sharded alike."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}

    def of(self, tensor: torch.Tensor) -> Sharding:
        key: object = None
        if (place := place_of(tensor)) is not None:
            key = (place.meshes, place.placements)
        elif isinstance(tensor, DTensor):
            key = (tensor.device_mesh, tensor.placements)
        if key not in self._known:
            self._known[key] = sharding_of(tensor)
        return self._known[key]


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Equal on all ranks."""
    if (place := place_of(tensor)) is not None:
        ranks, (_, *mesh) = place.meshes
        return Sharding(tuple(ranks), tuple(mesh), cuts_of(place.placements, mesh))
    if isinstance(tensor, DTensor):
        meshes = meshes_like(tensor.device_mesh)
        mesh = list(meshes.shape[1:])
        return Sharding(tuple(meshes.flatten().tolist()), tuple(mesh), cuts_of(tensor.placements, mesh))
    return Sharding.replicated(collectives.world_size())


def box_here(tensor: torch.Tensor, name: str) -> Box | None:
    """The part of ``tensor`` that this rank holds; None if its mesh is of other ranks. ``name``: for errors."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    cuts = cuts_of(tensor.placements, mesh.shape)
    if coordinate is None:
        return None
    box = Sharding((), tuple(mesh.shape), cuts).box_at(shape, coordinate)
    if uneven := describe_uneven(tensor, box):
        raise StateMismatch(f"cannot load {name}: {uneven}")
    return box


def describe_uneven(tensor: torch.Tensor, box: Box) -> str:
    """How this rank's part of ``tensor`` differs from ``box``, the one by its placements; empty if it does not.
    ``DTensor.from_local`` takes parts of any size, and no rank alone knows where they begin."""
    held = tuple(local_part(tensor).shape)
    if held == box.shape:
        return ""
    return (
        f"of its shape {list(tensor.shape)}, rank {collectives.rank()} holds {list(held)}, and torch's even shards "
        f"would be {list(box.shape)} here; redistribute it, or build it with distribute_tensor"
    )


def cuts_of(placements: Sequence[object], mesh: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The cuts of a :class:`Sharding`. A strided shard (FSDP2 over tensor parallelism) comes after those that it
    skips."""
    cuts = []
    for number in sorted(range(len(placements)), key=lambda number: isinstance(placements[number], _StridedShard)):
        placement = placements[number]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard) or not _is_contiguous(number, placements, mesh):
            raise CannotSave(f"cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first")
        cuts.append((number, placement.dim))
    return tuple(cuts)


def _is_contiguous(number: int, placements: Sequence[object], mesh: Sequence[int]) -> bool:
    """Whether a strided placement skips exactly the shards of the mesh dimensions after it."""
    placement = placements[number]
    if not isinstance(placement, _StridedShard):
        return True
    skipped = [
        mesh[later]
        for later in range(number + 1, len(placements))
        if (other := placements[later]) and type(other) is Shard and other.dim == placement.dim
    ]
    return placement.split_factor == math.prod(skipped)
