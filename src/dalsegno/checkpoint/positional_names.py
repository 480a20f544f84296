"""Names of an optimizer's parameters by position, ``group[0].params[3]``, where their FQNs are unknown.

torch numbers the parameters of an optimizer in the order of its groups. Other programs save only these numbers, so an
imported checkpoint has such names until a run resumes from it, whose optimizer determines which parameter each one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

from dalsegno.checkpoint.index import StoredTensor
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import State


def name_of(group: int, position: int) -> str:
    """Name of the parameter at ``position`` of ``group``."""
    return f"group[{group}].params[{position}]"


def are_all(groups: Sequence[Sequence[str]]) -> bool:
    """Whether each name in each group is that of its position."""
    return any(groups) and all(
        name == name_of(number, position) for number, names in enumerate(groups) for position, name in enumerate(names)
    )


def check_order(rest: State, groups: Sequence[Sequence[str]], elements: int, where: str) -> None:
    """Raises StateMismatch if a group has its parameters in another order than when it was saved, and the optimizer
    keeps state by their positions: lists in its groups, or a tensor over all elements in a row, as LBFGS.

    Args:
        rest: saved non-tensor state of the optimizer.
        groups: the names of the parameters of each group here.
        elements: number of elements of all parameters here.
    """
    changed = [
        (number, ours, group["params"])
        for number, (ours, group) in enumerate(zip(groups, rest["groups"], strict=False))
        if [*ours] != group["params"] and {*ours} == {*group["params"]}
    ]
    kept = next(_by_position(rest, elements), None) if changed else None
    if kept is None:
        return
    number, ours, theirs = changed[0]
    place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    raise StateMismatch(
        f"{where}: group {number} has its parameters in another order: number {place} was {theirs[place]}, here it is "
        f"{ours[place]}. {kept} is by position and would belong to other parameters; build the optimizer with its "
        "parameters in the saved order"
    )


def _by_position(rest: State, elements: int) -> Iterator[str]:
    """Places of state that belongs to no single parameter by its name."""
    for number, group in enumerate(rest["groups"]):
        for key, value in group.items():
            is_row = isinstance(value, list) and len(value) == len(group["params"])
            if key not in ("params", "param_names") and (is_row or any(_sizes(value))):
                yield f"groups[{number}][{key!r}]"
    yield from (f"state_dict[{key!r}]" for key in rest.get("further", ()))
    yield from (f"state[{key!r}]" for key, value in rest["other"].items() if any(_sizes(value)))
    for name, values in rest["state"].items():
        yield from (f"state of {name}: {kind}" for kind, value in values.items() if elements in _sizes(value))


def _sizes(value: object) -> list[int]:
    """Numbers of elements of the tensors in a value, without scalars."""
    return [each.numel() for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.dim()]


def differences(
    parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], kinds: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Parameters whose stored state has another shape: then the order of the parameters is another one.

    Args:
        parameters: here, by name.
        stored: tensors ``<name>.<kind>``.
        kinds: of each parameter's tensors. Those with another number of dimensions, such as factored moments, may have
            any shape.
    """
    for name, parameter in parameters.items():
        shapes = [stored[f"{name}.{kind}"].shape for kind in kinds.get(name, ())]
        same_rank = [shape for shape in shapes if len(shape) == parameter.dim()]
        if same_rank and tuple(parameter.shape) not in same_rank:
            yield f"{name}: saved for a parameter of {list(same_rank[0])}, here it has {list(parameter.shape)}"
