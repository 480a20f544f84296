"""Pipeline parallelism: a model cut into stages, each on other ranks (``torch.distributed.pipelining``).

Every rank keeps the whole model, with its names and shapes; the tensors of other ranks' stages are on the meta device.
So optimizer groups, checkpoints and measurements have the names of the whole model on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dalsegno.distributed.clip_grad import StageTotals, StepTotals
from dalsegno.distributed.inference import run_stages_of
from dalsegno.distributed.layout import data_dimensions
from dalsegno.distributed.modes import FSDP, STAGES, TENSOR, Pipeline, TensorParallel
from dalsegno.distributed.pipeline.cut import Cut, cut
from dalsegno.distributed.pipeline.runner import PipelineRunner
from dalsegno.distributed.pipeline.stage import StageModule
from dalsegno.distributed.sharded_tensors import complete, local_part
from dalsegno.distributed.stage_places import StagePlace, place_of, set_place
from dalsegno.errors import ConfigurationError

from .base import Parallel, make_copies_equal, tied_parameters
from .fsdp import shard, unit_names
from .tensor import planned_styles, split_layers

Stores = dict[str, tuple[int, ...]]
"""Coordinates, in the pipeline, of the ranks that store each parameter and buffer, by its first name."""


class Pipelined(Parallel):
    """Keeps this rank's stages of ``model`` and runs them.

    Args:
        model: on any device, equal on all ranks.
        mode: how it is cut, and the schedule.
        mesh: of all ranks; its first dimension has the stages.
        device: of this rank.
        sharding: shards each stage over the ranks that read different data; None: there is one such rank.
        layers: splits layers over the ranks that read the same data; None: there is one such rank in each stage.
        dtype: in which sharded parameters are gathered; None: their own.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Pipeline,
        mesh: DeviceMesh,
        device: torch.device,
        sharding: FSDP | None,
        layers: TensorParallel | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(model)
        self._mesh = mesh
        self._group = mesh.get_group(STAGES)
        self._inner = (mesh.mesh_dim_names or ())[1:]
        data = tuple(data_dimensions(self._inner))
        self._same_stage = mesh[self._inner]._flatten().get_group() if self._inner else None
        ranks, here = mesh.size(0), mesh.get_local_rank(STAGES)
        mode = replace(mode.of_model(model), size=ranks)
        mode.ranks(of=ranks)  # raises if this many stages do not fit
        assert not callable(mode.stages), "of_model has called it"
        stages = cut(model, mode.stages)
        self.entries = [each[stages.entry(number)] for number, each in enumerate(stages.stages) if number]
        stores = _stores(stages, ranks)
        make_copies_equal(model)
        _leave_to_others(model, stores, here, device)
        if layers is not None:
            styles = planned_styles(model, layers, mesh[TENSOR])
            _expect_in_stages(styles, stages)
            split_layers(model, styles, mesh[TENSOR])
            _leave_whole(model)
        modules = {number: StageModule(stages, number) for number in range(here, len(stages.stages), ranks)}
        if sharding is not None:
            tied, chosen = tied_parameters(model), unit_names(model, sharding)
            for module in modules.values():
                # Gathered once a step: a schedule has many micro-batches.
                shard(module, _names_in(module, model, chosen), sharding, mesh[data], dtype, False)
            _tie_again(tied)
        for module in modules.values():
            module.note_hooks()
        self._record_places(model, stores, here, device)
        self._device = device
        self._tied = self._groups_of_tied(model)
        self._buffers = [
            (module, key, place_of(buffer))
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.runner = PipelineRunner(
            modules,
            count=len(stages.stages),
            schedule=mode.schedule,
            group=self._group,
            last=(len(stages.stages) - 1) % ranks,
            copies=mesh[data]._flatten().get_group() if data else None,
            device=device,
        )
        run_stages_of(model, self.runner)

    def finish_backward(self) -> None:
        """Sum the gradients of parameters that several stages share. Collective."""
        for module, key, place in self._buffers:
            set_place(module._buffers[key], place)  # the forward may have replaced the tensor
        for parameter, group in self._tied:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else complete(parameter, parameter.grad)
            parameter.grad = gradient
            dist.all_reduce(local_part(gradient), group=group)

    def totals(self, parameters: Sequence[nn.Parameter]) -> StepTotals:
        return StageTotals(parameters, self._group, self._device)

    def _record_places(self, model: nn.Module, stores: Stores, here: int, device: torch.device) -> None:
        """Record where each tensor is stored; the ranks of other stages send its placements. Collective."""
        tensors = _tensors(model)
        own = {name: self._placements(each) for name, each in tensors.items() if here in stores[name]}
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        placements = {name: its for each in gathered for name, its in each.items()}
        for name, tensor in tensors.items():
            several = self._mesh.mesh[list(stores[name])]
            groups = [
                self._mesh.get_group(dimension)
                for dimension, placement in zip(self._inner, placements[name], strict=True)
                if not placement.is_replicate() and self._mesh[dimension].size() > 1
            ]
            place = StagePlace(
                meshes=(tuple(several.flatten().tolist()), tuple(several.shape)),
                placements=placements[name],
                shards=tuple(groups),
                pipeline=self._group,
                copies=self._same_stage,
                counts=here == stores[name][0],
                device=device,
            )
            set_place(tensor, place)

    def _placements(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Placement of a tensor of this rank on each dimension of the mesh but the first."""
        if not isinstance(tensor, DTensor):
            return tuple(Replicate() for _ in self._inner)
        its = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
        return tuple(its.get(name, Replicate()) for name in self._inner)

    def _groups_of_tied(self, model: nn.Module) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """This rank's parameters that several ranks of the pipeline train, each with those ranks. Collective."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for parameter in model.parameters():
            place = place_of(parameter)
            if place is None or place.meshes[1][0] == 1 or not parameter.requires_grad:
                continue
            columns = torch.tensor(place.meshes[0]).reshape(place.meshes[1][0], -1).T
            for column in columns.tolist():
                key = tuple(column)
                if key not in groups:
                    groups[key] = dist.new_group(column)
                if dist.get_rank() in column:
                    tied.append((parameter, groups[key]))
        return tied


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _stores(stages: Cut, ranks: int) -> Stores:
    model = stages.model
    found: dict[int, set[int]] = defaultdict(set)  # by the tensor's id: a tied one has several names
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        found[id(tensor)].update(stage % ranks for stage in stages.stages_of(name))
    every = tuple(range(ranks))
    return {name: tuple(sorted(found[id(tensor)])) or every for name, tensor in _tensors(model).items()}


def _leave_to_others(model: nn.Module, stores: Stores, here: int, device: torch.device) -> None:
    """Move this rank's tensors to ``device``, and replace the others by ones without data; tied ones stay tied."""
    replaced: dict[int, Tensor] = {}
    for name, tensor in _tensors(model).items():
        target = device if here in stores[name] else torch.device("meta")
        if tensor.device != target:
            moved = replaced[id(tensor)] = _in_place_of(tensor, tensor.detach().to(target))
            moved.__dict__.update(tensor.__dict__)
    _replace(model, replaced)


def _leave_whole(model: nn.Module) -> None:
    """Replace the parts of other stages' tensors, which have no data, by whole ones without data."""
    replaced: dict[int, Tensor] = {}
    for tensor in _tensors(model).values():
        if isinstance(tensor, DTensor) and tensor.is_meta:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            replaced[id(tensor)] = _in_place_of(tensor, whole)
    _replace(model, replaced)


def _in_place_of(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _replace(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    """Put other tensors in place of the model's, by their ``id``."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for key, present in own.items():
                if id(present) in replaced:
                    own[key] = replaced[id(present)]  # type: ignore[assignment]


def _tie_again(tied: Mapping[nn.Parameter, Mapping[str, tuple[nn.Module, str]]]) -> None:
    """Put what has replaced a parameter in the places that belong to modules of other stages, too."""
    for before, places in tied.items():
        found = [module._parameters[key] for module, key in places.values()]
        sharded = next((each for each in found if each is not before), before)
        for module, key in places.values():
            module._parameters[key] = sharded


def _expect_in_stages(names: Iterable[str], stages: Cut) -> None:
    units = [unit for modules in stages.stages for unit in modules]
    for name in names:
        if not any(name == unit or name.startswith(f"{unit}.") for unit in units):
            raise ConfigurationError(
                f"TensorParallel: the plan has {name!r}, parts of which are in several stages of the pipeline; name "
                "modules inside it"
            )


def _names_in(stage: nn.Module, model: nn.Module, names: list[str] | None) -> list[str] | None:
    """Names, in a stage, of those modules of the model that it has."""
    if names is None:
        return None
    chosen = {model.get_submodule(name) for name in names}
    return [name for name, module in stage.named_modules() if module in chosen]
