"""The form of an optimizer's saved state, and whether the optimizer accepts its hyperparameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from dalsegno.checkpoint.tensor_files import Shape
from dalsegno.checkpoint.wrapped import SavedSpec
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Must, check, check_like

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
    kinds = {name: {*values} for name, values in rest["state"].items()}
    columns = [*rest["sharded"].items(), *((column["kind"], column["names"]) for column in rest["scalars"])]
    for kind, names in columns:
        for name in names:
            kinds.setdefault(name, set()).add(kind)
    for number, (saved, here) in enumerate(zip(rest["groups"], optimizer.param_groups, strict=True)):
        example = {key: value for key, value in here.items() if key not in ("params", "param_names")}
        given = {key: value for key, value in saved.items() if value is not None or key not in optional}
        check_like(given, example, f"{where}.groups[{number}]")
        if any(_is_number(value) and value != example.get(key) for key, value in given.items()):
            _check_accepted(type(optimizer), given, kinds, f"{where}.groups[{number}]")


_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments that choose how a step is computed."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | tuple)


_READ_IF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Hyperparameters of torch's optimizers, each with the value of a parameter that a step then reads."""


def _check_accepted(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], kinds: Mapping[str, set[str]], where: str
) -> None:
    """Try hyperparameters in the constructor of a torch optimizer, and whether a step finds the values that it reads,
    of the ``kinds`` of each parameter. Otherwise, a bad one would fail only in the first step of the run."""
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
            if kinds.get(name) and needed not in kinds[name]:
                raise StateMismatch(
                    f"{where}: with these, {kind.__name__} needs {needed!r}, which is not saved for {name}"
                )


def _optional_arguments(kind: type) -> set[str]:
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is None}
