"""Tensor parallelism: layers split over neighbouring ranks that read the same data, by torch.distributed.tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from dalsegno.distributed.blocks import matching_names
from dalsegno.distributed.modes import TensorParallel
from dalsegno.errors import ConfigurationError

from .base import tied_parameters

_STYLES_OF_TRANSFORMERS: Mapping[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Styles in the plans of Hugging Face models, by name."""


def split_layers(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Replace the parameters of the modules in ``styles`` by DTensors on ``mesh``, which has one dimension. Each rank
    keeps a part of its own copy, so the copies must be equal. Gradients of the rest of the model are equal on all
    ranks, because their inputs are."""
    tied = tied_parameters(model)
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for places in tied.values():
        _tie_again(places)


def planned_styles(model: nn.Module, mode: TensorParallel, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """The style of each module to split over ``mesh``, by its name."""
    plan = _plan_of_transformers(model, mesh.size()) if isinstance(mode.plan, str) else mode.plan
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigurationError(
                f"TensorParallel: the plan has {style!r} for {pattern!r}; needs a style of "
                "torch.distributed.tensor.parallel, such as ColwiseParallel()"
            )
        styles |= dict.fromkeys(matching_names(model, pattern, "the plan of TensorParallel"), style)
    return styles


def _plan_of_transformers(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"TensorParallel('auto'): {type(model).__name__} has no plan of its own (tp_plan, of Hugging Face models); "
            "pass one: TensorParallel({'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()})"
        )
    unknown = {pattern: style for pattern, style in plan.items() if style not in _STYLES_OF_TRANSFORMERS}
    if unknown:
        known = {pattern: style for pattern, style in plan.items() if pattern not in unknown}
        raise ConfigurationError(
            f"TensorParallel('auto'): the plan of {type(model).__name__} has styles that split weights outside of "
            f"torch.distributed.tensor.parallel: {unknown}; pass a plan without these modules, of {list(known)}"
        )
    splits_attention = any("attn" in pattern or "attention" in pattern for pattern in plan)
    for heads in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(getattr(model, "config", None), heads, None)
        if splits_attention and number is not None and number % ranks:
            raise ConfigurationError(
                f"TensorParallel('auto'): {ranks} ranks cannot share the {number} {heads} of {type(model).__name__}; "
                "use a size that divides them, or pass a plan that leaves the attention whole"
            )
    return {pattern: _STYLES_OF_TRANSFORMERS[style]() for pattern, style in plan.items()}


def _tie_again(places: Mapping[str, tuple[nn.Module, str]]) -> None:
    parameters = {name: module._parameters[key] for name, (module, key) in places.items()}
    first, *others = parameters
    for name in others:
        if _placement(parameters[name]) != _placement(parameters[first]):
            raise ConfigurationError(
                f"TensorParallel: {first} and {name} are one tied weight, and the plan splits them differently; "
                "split both alike (an embedding by RowwiseParallel, the output by ColwiseParallel), or neither"
            )
        module, key = places[name]
        module._parameters[key] = parameters[first]


def _placement(parameter: torch.Tensor | None) -> object:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
