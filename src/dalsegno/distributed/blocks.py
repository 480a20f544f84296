"""Blocks of a model: the elements of its ``ModuleList`` and ``Sequential`` modules, such as a transformer's layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks with parameters that are in no other block, in the model's order."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for block in _blocks(model):
        if block not in inside and any(True for _ in block.parameters()):
            found.append(block)
        inside.update(block.modules())
    return found


def unshared_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks with parameters that share none with the rest of the model; inner ones first, as fully_shard requires.

    Two units that share a parameter would each shard it separately and break the tie, so a part that shares a
    parameter with another is left to the enclosing unit.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].add(module)
    return [block for block in reversed(_blocks(model)) if _shares_no_parameter(block, holders)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """All of them, each once, outer ones before those inside."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return list(dict.fromkeys(block for each in lists for block in each))


def _shares_no_parameter(block: nn.Module, holders: Mapping[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether ``block`` has parameters and shares none of them."""
    parameters, parts = list(block.parameters()), set(block.modules())
    return bool(parameters) and all(holders[parameter] <= parts for parameter in parameters)
