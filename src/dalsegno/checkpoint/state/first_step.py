"""How much state an optimizer creates in its first step."""

from __future__ import annotations

from torch import optim

_TWO = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax)  # AdamW is an Adam


def tensors_per_parameter(optimizer: optim.Optimizer) -> int | None:
    """Number of tensors of a parameter's size that the first step creates for each; None if that is not known."""
    groups = optimizer.param_groups
    if isinstance(optimizer, _TWO):
        return 3 if any(group.get("amsgrad") for group in groups) else 2
    if isinstance(optimizer, optim.SGD):
        return 1 if any(group["momentum"] for group in groups) else 0
    return None
