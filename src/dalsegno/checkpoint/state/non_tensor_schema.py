"""Schema of the non-tensor state of model and optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from dalsegno.checkpoint.format.layout import Shape
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import State
from dalsegno.stateful.schema import Must, check, check_like

from .forms import is_form
from .optimizer_rows import OptimizerRows

WrappedForm = Annotated[Any, Must("the form of a wrapped tensor", is_form)]


class ModelRest(TypedDict):
    tied: dict[str, str]
    extra: dict[str, Any]
    wrapped: NotRequired[dict[str, WrappedForm]]


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
    """One scalar of a kind for each of these parameters."""

    kind: str
    names: list[str]
    values: torch.Tensor
    on_cpu: bool


class OptimizerRest(TypedDict):
    scalars: list[Annotated[ScalarColumn, Must("a row of numbers, one per name", _is_column)]]
    state: dict[str, Annotated[dict[str, Any], Must("a possible step count", _counts_steps)]]
    sharded: Names
    on_cpu: Names
    wrapped: NotRequired[dict[str, dict[str, WrappedForm]]]
    strides: NotRequired[dict[str, dict[str, Shape]]]
    tied: NotRequired[dict[str, dict[str, tuple[str, str]]]]
    other: dict[str | int, Any]
    further: NotRequired[dict[str, Any]]
    built: NotRequired[int]
    groups: list[Annotated[dict[str, Any], Must("a group with the names of its params", _names_params)]]


def check_model_rest(rest: State, names: Collection[str], where: str) -> None:
    """Raises StateMismatch if ``rest`` cannot have been saved from a model whose saved tensors have these ``names``."""
    check(rest, ModelRest, where)
    for alias, name in rest["tied"].items():
        if name not in names:
            raise StateMismatch(f"{where}.tied: {alias!r} is tied to {name!r}, which is not saved")


def check_optimizer_rest(rest: State, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Hyperparameters must have the same types as those of ``optimizer``, if it has as many groups.

    Raises:
        StateMismatch: if ``rest`` cannot have been saved from such an optimizer.
    """
    check(rest, OptimizerRest, where)
    if len(rest["groups"]) != len(optimizer.param_groups):
        return
    optional = _optional_arguments(type(optimizer))
    for number, (saved, here) in enumerate(zip(rest["groups"], optimizer.param_groups, strict=True)):
        example = {key: value for key, value in here.items() if key not in ("params", "param_names")}
        given = {key: value for key, value in saved.items() if value is not None or key not in optional}
        check_like(given, example, f"{where}.groups[{number}]")
        if any(_is_number(value) and value != example.get(key) for key, value in given.items()):
            _check_accepted(type(optimizer), given, _moments(rest, saved["params"]), f"{where}.groups[{number}]")


_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments that choose how a step is computed."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | tuple)


def _moments(rest: State, names: list[str]) -> dict[frozenset[str], str]:
    """The kinds of values that are saved for a parameter that has been updated, each set with one such parameter."""
    rows = OptimizerRows.of(rest)
    kinds = {frozenset({*rows.plain.get(name, ()), *rows.sharded.get(name, ())}): name for name in names}
    return {each: name for each, name in kinds.items() if each}


def _check_accepted(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], moments: dict[frozenset[str], str], where: str
) -> None:
    """Try hyperparameters in the constructor of a torch optimizer, and in a step on a parameter of one element.
    Otherwise, a bad one would fail only in the first step of the run. Raises StateMismatch if the constructor refuses
    one, or a step needs a value that ``moments`` does not have."""
    numbers = {key: value for key, value in group.items() if _is_number(value) and key not in _IMPLEMENTATION}
    for key, value in numbers.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number.bit_length() > 63:
                raise StateMismatch(f"{where}.{key}: {value} does not fit into 64 bits")
    if not kind.__module__.startswith("torch.optim."):
        return
    known = inspect.signature(kind).parameters
    arguments = {key: value for key, value in numbers.items() if key in known}
    try:
        kind([torch.zeros(1, 1)], **arguments)
    except ValueError as error:
        raise StateMismatch(f"{where}: {kind.__name__} does not accept it: {error}") from error
    for kinds, name in moments.items():
        lacking = [_lacking(kind, arguments, kinds, shape) for shape in ((1, 1), (1,))]  # some treat vectors otherwise
        if all(lacking):
            raise StateMismatch(
                f"{where}: with these, {kind.__name__} needs {lacking[0]}, which is not saved for {name}"
            )


def _lacking(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any], kinds: frozenset[str], shape: tuple[int, ...]
) -> str | None:
    """The value that the second step on a parameter of this shape lacks, if only ``kinds`` are left of its state. None
    if it lacks none, or needs a closure, sparse gradients or another shape."""
    probe = torch.zeros(shape, requires_grad=True)
    probe.grad = torch.zeros(shape)
    try:
        optimizer = kind([probe], **arguments)
        step = getattr(kind.step, "__wrapped__", kind.step)  # past the hooks that the user has set on all optimizers
        step(optimizer)
        state = optimizer.state[probe]
        for other in state.keys() - kinds:
            del state[other]
        step(optimizer)
    except KeyError as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None


def _optional_arguments(kind: type) -> set[str]:
    """Arguments of a class whose default is None."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is None}
