"""Parts of a model: modules by name, and blocks, the elements of its ``ModuleList`` and ``Sequential`` modules, such as
a transformer's layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from dalsegno.errors import UnknownName


def matching_names(model: nn.Module, pattern: str, argument: str) -> list[str]:
    """Names of the modules that ``pattern`` matches, part by part: ``layers.*.up`` matches ``layers.0.up``. Raises
    UnknownName if there is none; the message names ``argument`` and suggests the nearest."""
    names, wanted = [name for name, _ in model.named_modules() if name], pattern.split(".")
    alike = [name for name in names if name.count(".") == pattern.count(".")]
    matching = [name for name in alike if all(map(fnmatchcase, name.split("."), wanted))]
    if not matching:
        raise UnknownName(f"module in {argument}:", pattern, names)
    return matching


def outermost_blocks(model: nn.Module, apart: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The blocks with parameters that are in no other block, in the model's order. In place of a block around one of
    the modules ``apart``, those inside it are returned."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for block in _blocks(model):
        if any(part in apart for part in block.modules() if part is not block):
            continue
        if block not in inside and any(True for _ in block.parameters()):
            found.append(block)
        inside.update(block.modules())
    return found


def unshared(model: nn.Module, names: Iterable[str] | None) -> list[nn.Module]:
    """The modules of these names (None: all blocks) with parameters that share none with the rest of the model; inner
    ones first, as fully_shard requires.

    Two units that share a parameter would each shard it separately and break the tie, so a part that shares a
    parameter with another is left to the enclosing unit.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].add(module)
    chosen = _blocks(model) if names is None else [model.get_submodule(name) for name in names]
    order = {module: place for place, module in enumerate(model.modules())}
    chosen.sort(key=order.__getitem__, reverse=True)
    return [block for block in chosen if _shares_no_parameter(block, holders)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """All of them, each once, outer ones before those inside."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return list(dict.fromkeys(block for each in lists for block in each))


def _shares_no_parameter(block: nn.Module, holders: Mapping[nn.Parameter, set[nn.Module]]) -> bool:
    """Whether ``block`` has parameters and shares none of them."""
    parameters, parts = list(block.parameters()), set(block.modules())
    return bool(parameters) and all(holders[parameter] <= parts for parameter in parameters)
