"""Names of an optimizer's parameters by position, ``group[0].params[3]``, where their FQNs are unknown.

torch numbers the parameters of an optimizer in the order of its groups. Other programs save only these numbers, so an
imported checkpoint has such names until a run resumes from it, whose optimizer determines which parameter each one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from dalsegno.checkpoint.format.stored_tensors import StoredTensor


def name_of(group: int, position: int) -> str:
    """Name of the parameter at ``position`` of ``group``."""
    return f"group[{group}].params[{position}]"


def are_all(groups: Sequence[Sequence[str]]) -> bool:
    """Whether each name in each group is that of its position."""
    return any(groups) and all(
        name == name_of(number, position) for number, names in enumerate(groups) for position, name in enumerate(names)
    )


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
