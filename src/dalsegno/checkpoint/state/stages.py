"""State of an optimizer of a model that is cut into pipeline stages: each rank has that of its stages only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import like_parameter

from .contract import Tensors
from .forms import Form
from .optimizer_rows import OptimizerRows


def of_all_stages(
    named: Sequence[tuple[str, torch.Tensor]], tensors: Tensors, rows: OptimizerRows
) -> tuple[Tensors, OptimizerRows]:
    """Complete the state with that of other stages, so that all ranks have the same names. Collective.

    Args:
        named: parameters of the optimizer, by name, in its order.
        tensors: this rank's sharded tensors, ``<name>.<kind>``.
        rows: the rest of this rank's state.

    Returns:
        The tensors, those of other stages without data, and the rows of all ranks; both in the optimizer's order.
    """
    forms = {key: (tuple(each.shape), each.dtype) for key, each in tensors.items()}
    plain: dict[str, dict[str, object]] = {}
    sharded: dict[str, list[str]] = {}
    on_cpu: dict[str, list[str]] = {}
    wrapped: dict[str, dict[str, Form]] = {}
    strides: dict[str, dict[str, list[int]]] = {}
    tied: dict[str, dict[str, tuple[str, str]]] = {}
    all_forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    on_host = replace(rows, plain={name: _on_host(values) for name, values in rows.plain.items()})
    for its_forms, its_state in collectives.gather((forms, on_host.by_kind()), "an optimizer's state"):
        of_rank = OptimizerRows.of(its_state)
        strides |= {name: its for name, its in of_rank.strides.items() if name not in plain}
        tied |= {name: its for name, its in of_rank.tied.items() if name not in plain}
        for name in of_rank.plain:
            if name not in plain:  # a tied parameter has equal state on each of its stages
                plain[name] = of_rank.plain[name]
                sharded |= {name: kinds} if (kinds := of_rank.sharded.get(name)) else {}
                on_cpu |= {name: kinds} if (kinds := of_rank.on_cpu.get(name)) else {}
                wrapped |= {name: its} if (its := of_rank.wrapped.get(name)) else {}
        all_forms = its_forms | all_forms
    ordered = [(name, parameter) for name, parameter in named if name in plain]
    complete = {
        key: tensors[key] if key in tensors else like_parameter(_without_data(*all_forms[key]), parameter)
        for name, parameter in ordered
        for kind in sharded.get(name, ())
        if (key := f"{name}.{kind}")
    }
    return complete, OptimizerRows({name: plain[name] for name, _ in ordered}, sharded, on_cpu, wrapped, strides, tied)


def _on_host(values: dict[str, object]) -> dict[str, object]:
    return {kind: value.cpu() if isinstance(value, torch.Tensor) else value for kind, value in values.items()}


def _without_data(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
