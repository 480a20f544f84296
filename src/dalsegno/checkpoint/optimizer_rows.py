"""An optimizer's state by kind: one entry for a scalar that each of thousands of parameters has, such as ``step``.

::

    {"scalars": [{"kind": "step", "names": ["weight", "bias"], "values": tensor([7., 7.]), "on_cpu": False}],
     "sharded": {"exp_avg": ["weight", "bias"]}, "state": {}, "on_cpu": {}}

``sharded`` names the parameters whose state of a kind is among the sharded tensors. Of a wrapped state, such as moments
in 8 bits, each part is a kind (``exp_avg.codes``), and ``wrapped`` has its spec by parameter and kind. ``strides`` and
``tied`` have those of sharded tensors that do not lie in memory as their parameter, or are another one. ``state``
and ``on_cpu`` have, by parameter name, everything else, such as a step counter that parameters share.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from dalsegno.checkpoint.contract import Tensors
from dalsegno.checkpoint.tensor_files import Shape, is_plain
from dalsegno.checkpoint.wrapped import SavedSpec, WrapperSpec, ends
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import like_parameter
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Must, check, check_like


@dataclass(frozen=True, slots=True)
class OptimizerRows:
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values by kind, for each parameter that has a state, even an empty one."""
    sharded: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are sharded tensors."""
    on_cpu: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are on the CPU while the parameter is not."""
    wrapped: dict[str, dict[str, WrapperSpec]] = field(default_factory=dict)
    """Specs of the kinds that are wrapped tensors, whose parts are sharded."""
    strides: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Strides of the kinds that are sharded tensors with others than their parameter."""
    tied: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """Kinds that are the same tensor as one that comes before them, with its parameter and kind."""

    def parts(self, name: str) -> list[str]:
        """Kinds of the parts of a parameter's wrapped states: ``exp_avg.codes``."""
        return [f"{kind}{end}" for kind, form in self.wrapped.get(name, {}).items() for end in ends(form)]

    def whole(self, name: str) -> list[str]:
        """Kinds of a parameter that are sharded tensors themselves."""
        parts = {*self.parts(name)}
        return [kind for kind in self.sharded.get(name, ()) if kind not in parts]

    def by_kind(self) -> State:
        columns: dict[tuple[Any, ...], tuple[list[str], list[torch.Tensor]]] = {}
        plain: dict[str, dict[str, Any]] = {}
        on_cpu: dict[str, list[str]] = {}
        ids = [id(value) for values in self.plain.values() for value in values.values()]
        shared = {each for each, count in Counter(ids).items() if count > 1} if len({*ids}) < len(ids) else ()
        for name, values in self.plain.items():
            if not values and name not in self.sharded:
                plain[name] = {}
            for kind, value in values.items():
                is_on_cpu = kind in self.on_cpu.get(name, ())
                if _is_scalar(value) and (not shared or id(value) not in shared):
                    names, scalars = columns.setdefault((kind, is_on_cpu, value.dtype, value.device), ([], []))
                    names.append(name)
                    scalars.append(value)
                    continue
                plain.setdefault(name, {})[kind] = value
                if is_on_cpu:
                    on_cpu.setdefault(name, []).append(kind)
        sharded: dict[str, list[str]] = {}
        for name, kinds in self.sharded.items():
            for kind in kinds:
                sharded.setdefault(kind, []).append(name)
        return {
            "scalars": [
                {"kind": kind, "names": names, "values": torch.stack(scalars), "on_cpu": is_on_cpu}
                for (kind, is_on_cpu, *_), (names, scalars) in columns.items()
            ],
            "sharded": sharded,
            "state": plain,
            "on_cpu": on_cpu,
            **{kind: each for kind in ("wrapped", "strides", "tied") if (each := getattr(self, kind))},
        }

    @classmethod
    def of(cls, saved: State) -> OptimizerRows:
        rows = cls(
            _copied(saved["state"], dict),
            on_cpu=_copied(saved["on_cpu"], list),
            **{kind: _copied(saved.get(kind, {}), dict) for kind in ("wrapped", "strides", "tied")},
        )
        for column in saved["scalars"]:
            kind = column["kind"]
            for name, value in zip(column["names"], column["values"], strict=True):
                rows.plain.setdefault(name, {})[kind] = value.clone()
                if column["on_cpu"]:
                    rows.on_cpu.setdefault(name, []).append(kind)
        for kind, names in saved["sharded"].items():
            for name in names:
                rows.plain.setdefault(name, {})
                rows.sharded.setdefault(name, []).append(kind)
        return rows


def _is_scalar(value: object) -> bool:
    return type(value) is torch.Tensor and value.dim() == 0 and is_plain(value)


def _copied(by_name: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    return {name: kind(values) for name, values in by_name.items()}


def of_all_stages(
    named: Sequence[tuple[str, torch.Tensor]], tensors: Tensors, rows: OptimizerRows
) -> tuple[Tensors, OptimizerRows]:
    """Complete the state with that of other stages, so that all ranks have the same names, in the optimizer's order of
    ``named``; their tensors have no data. Collective."""
    shapes = {key: (tuple(each.shape), each.dtype) for key, each in tensors.items()}
    on_host = replace(rows, plain={name: _on_host(values) for name, values in rows.plain.items()})
    of_all = OptimizerRows()
    shapes_of_all: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for its_shapes, its_state in collectives.gather((shapes, on_host.by_kind()), "an optimizer's state"):
        of_rank = OptimizerRows.of(its_state)
        new = of_rank.plain.keys() - of_all.plain.keys()  # a tied parameter has equal state on each of its stages
        for part in fields(OptimizerRows):
            its = getattr(of_rank, part.name)
            getattr(of_all, part.name).update({name: its[name] for name in its if name in new})
        shapes_of_all = its_shapes | shapes_of_all
    ordered = [(name, parameter) for name, parameter in named if name in of_all.plain]
    complete = {
        key: tensors[key]
        if key in tensors
        else like_parameter(torch.empty(shapes_of_all[key][0], dtype=shapes_of_all[key][1], device="meta"), parameter)
        for name, parameter in ordered
        for kind in of_all.sharded.get(name, ())
        if (key := f"{name}.{kind}")
    }
    return complete, replace(of_all, plain={name: of_all.plain[name] for name, _ in ordered})


def _on_host(values: dict[str, object]) -> dict[str, object]:
    return {kind: value.cpu() if isinstance(value, torch.Tensor) else value for kind, value in values.items()}


Names = dict[str, list[str]]


def _names_params(group: dict[str, Any]) -> bool:
    check(group["params"], list[str], "params")
    return True


def _is_column(column: dict[str, Any]) -> bool:
    values = column["values"]
    is_row = values.dim() == 1 and len(values) == len(column["names"])
    return is_row and (column["kind"] != "step" or all(map(_is_count, values.tolist())))


def _counts_steps(values: dict[str, Any]) -> bool:
    return values.get("step") is None or _is_count(float(values["step"]))


def _is_count(steps: float) -> bool:
    """Whether ``steps`` is a possible step count; larger numbers overflow where betas are raised to them."""
    return 0 <= steps < 1 << 53


class ScalarColumn(TypedDict):
    kind: str
    names: list[str]
    values: torch.Tensor
    on_cpu: bool


class OptimizerRest(TypedDict):
    scalars: list[Annotated[ScalarColumn, Must("a row of numbers, one per name", _is_column)]]
    state: dict[str, Annotated[dict[str, Any], Must("a possible step count", _counts_steps)]]
    sharded: Names
    on_cpu: Names
    wrapped: NotRequired[dict[str, dict[str, SavedSpec]]]
    strides: NotRequired[dict[str, dict[str, Shape]]]
    tied: NotRequired[dict[str, dict[str, tuple[str, str]]]]
    other: dict[str | int, Any]
    further: NotRequired[dict[str, Any]]
    built: NotRequired[int]
    groups: list[Annotated[dict[str, Any], Must("a group with the names of its params", _names_params)]]


def check_optimizer_rest(rest: State, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Hyperparameters must have the same types as those of ``optimizer``, if it has as many groups."""
    check(rest, OptimizerRest, where)
    if len(rest["groups"]) != len(optimizer.param_groups):
        return
    optional = _optional_arguments(type(optimizer))
    rows = OptimizerRows.of(rest)
    for number, (saved, here) in enumerate(zip(rest["groups"], optimizer.param_groups, strict=True)):
        example = {key: value for key, value in here.items() if key not in ("params", "param_names")}
        given = {key: value for key, value in saved.items() if value is not None or key not in optional}
        check_like(given, example, f"{where}.groups[{number}]")
        if any(_is_number(value) and value != example.get(key) for key, value in given.items()):
            _check_accepted(type(optimizer), given, rows, f"{where}.groups[{number}]")


_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments that choose how a step is computed."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | tuple)


_READ_IF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Hyperparameters of torch's optimizers, each with the value of a parameter that a step then reads."""


def _check_accepted(kind: type[torch.optim.Optimizer], group: dict[str, Any], rows: OptimizerRows, where: str) -> None:
    """Try hyperparameters in the constructor of a torch optimizer, and whether a step finds the values that it reads.
    Otherwise, a bad one would fail only in the first step of the run."""
    numbers = {key: value for key, value in group.items() if _is_number(value) and key not in _IMPLEMENTATION}
    for key, value in numbers.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number.bit_length() > 63:
                raise StateMismatch(f"{where}.{key}: {value} does not fit into 64 bits")
    if not kind.__module__.startswith("torch.optim."):
        return
    known = inspect.signature(kind).parameters
    try:
        kind([torch.zeros(1, 1)], **{key: value for key, value in numbers.items() if key in known})
    except ValueError as error:
        raise StateMismatch(f"{where}: {kind.__name__} does not accept it: {error}") from error
    for needed in (needed for flag, needed in _READ_IF.items() if numbers.get(flag)):
        for name in group["params"]:
            kinds = {*rows.plain.get(name, ()), *rows.sharded.get(name, ())}
            if kinds and needed not in kinds:
                raise StateMismatch(
                    f"{where}: with these, {kind.__name__} needs {needed!r}, which is not saved for {name}"
                )


def _optional_arguments(kind: type) -> set[str]:
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is None}
