"""Cut: which module of a model belongs to which stage of a pipeline.

A stage begins at a module, its *entry*: the activation that enters it is what the stage before sends. So a stage has
whole modules, and the model's own forward determines what happens between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dalsegno.errors import ConfigurationError, UnknownName

Stages = int | Sequence[str] | Sequence[Sequence[str]]
"""A number of stages; the names of the modules at which all stages but the first begin; or, for each stage, the names
of its modules in the order in which the forward calls them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages of a model."""

    model: nn.Module
    stages: tuple[Mapping[str, nn.Module], ...]
    """Modules of each stage, by name. Together they have all parameters but those in ``shared``."""
    shared: frozenset[str]
    """Names of parameters and buffers that belong to a module above the stages; every stage has them."""

    def entry(self, stage: int) -> str:
        """Name of the module at which a stage begins."""
        return next(iter(self.stages[stage]))

    def stages_of(self, name: str) -> Sequence[int]:
        """The stages that have the tensor of this name; of a tied one, those that have it under this name."""
        if name in self.shared:
            return range(len(self.stages))
        return [
            number
            for number, modules in enumerate(self.stages)
            if any(name.startswith(f"{module}.") for module in modules)
        ]


def cut(model: nn.Module, stages: Stages) -> Cut:
    if isinstance(stages, int):
        return _at(model, _even_entries(model, stages))
    if all(isinstance(each, str) for each in stages):
        return _at(model, [str(each) for each in stages])
    return _listed(model, [[each] if isinstance(each, str) else list(each) for each in stages])


def _even_entries(model: nn.Module, stages: int) -> list[str]:
    """First block of each stage but the first; the blocks are the elements of the model's longest list of layers."""
    lists = {
        name: [f"{name}.{key}" if name else key for key, block in module.named_children() if _has_tensors(block)]
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    }
    blocks = max(lists.values(), key=len, default=[])
    if not 2 <= stages <= len(blocks):
        longest = next((name for name, found in lists.items() if found is blocks), "")
        what = f"{type(model).__name__} has no ModuleList or Sequential with two blocks; name the modules of each stage"
        if len(blocks) > 1:
            what = (
                f"the model's longest list of layers, {longest!r}, has {len(blocks)} blocks with parameters: from 2 to "
                f"{len(blocks)} stages fit"
            )
        raise ConfigurationError(f"Pipeline(stages={stages}): {what}")
    return [blocks[round(number * len(blocks) / stages)] for number in range(1, stages)]


def _at(model: nn.Module, entries: Sequence[str]) -> Cut:
    """Cut before each of ``entries``; modules are taken in the order in which the model registers them."""
    modules = dict(model.named_modules())
    for name in entries:
        _expect_module(name, modules)
    found: list[dict[str, nn.Module]] = [{}]
    for name in _units(model, set(entries)):
        if len(found) <= len(entries) and name == entries[len(found) - 1]:
            found.append({})
        found[-1][name] = modules[name]
    if len(found) <= len(entries):
        raise ConfigurationError(
            f"Pipeline: no stage can begin at {entries[len(found) - 1]!r}: it has no parameters, is inside another "
            f"stage's first module, or is registered before {entries[len(found) - 2]!r}; give the split points in the "
            "model's order"
        )
    return _checked(model, found)


def _listed(model: nn.Module, stages: Sequence[Sequence[str]]) -> Cut:
    modules = dict(model.named_modules())
    for name in (name for names in stages for name in names):
        _expect_module(name, modules)
    stages = [[inner for name in names for inner in _elements(name, modules[name])] for names in stages]
    names = [name for names in stages for name in names]
    for name in names:
        inside = next((f", by itself and in {other!r}" for other in names if name.startswith(f"{other}.")), "")
        if inside or names.count(name) > 1:
            raise ConfigurationError(f"Pipeline: {name!r} is listed twice{inside}; list it once")
    return _checked(model, [{name: modules[name] for name in names} for names in stages])


def _checked(model: nn.Module, stages: Sequence[Mapping[str, nn.Module]]) -> Cut:
    units = [name for modules in stages for name in modules]
    for number, modules in enumerate(stages):
        if not any(_has_tensors(module) for module in modules.values()):
            raise ConfigurationError(
                f"Pipeline: stage {number} has no parameters ({', '.join(modules) or 'no modules'}); use fewer stages, "
                "or begin it elsewhere"
            )
    above = {name.rpartition(".")[0] for unit in units for name in _parents(unit)} | {""}
    outside = [name for name in model.state_dict(keep_vars=True) if not any(name.startswith(f"{u}.") for u in units)]
    shared = frozenset(name for name in outside if name.rpartition(".")[0] in above)
    for name in outside:
        if name not in shared:
            raise ConfigurationError(
                f"Pipeline: {name.rpartition('.')[0]!r} has parameters and is in no stage; add it to the stage that "
                "calls it"
            )
    extra = next((name for name in model.state_dict(keep_vars=True) if name.endswith("_extra_state")), None)
    if extra is not None:
        raise ConfigurationError(f"Pipeline: the model saves {extra}, which is not a tensor; that is not supported")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigurationError(
            "Pipeline: the model's config has output_router_logits=True, and each stage has the logits of its layers "
            "only, so the auxiliary loss would differ; set it to False"
        )
    return Cut(model, tuple(dict(modules) for modules in stages), shared)


def _parents(name: str) -> list[str]:
    """``a.b.c`` → ``a.b.c``, ``a.b``, ``a``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _units(model: nn.Module, entries: set[str]) -> list[str]:
    """Names of the outermost modules with tensors that contain no entry, in the order of registration."""
    above = {parent for entry in entries for parent in _parents(entry)[1:]}
    units: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{unit}.") for unit in units[-1:])
        if name and name not in above and not is_inside and not _is_list(module) and _has_tensors(module):
            units.append(name)
    return units


def _is_list(module: nn.Module) -> bool:
    """The model calls the elements of such a module, never the module itself."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _elements(name: str, module: nn.Module) -> list[str]:
    """Names of the modules that are called under this name: a list's elements, else the module itself."""
    if not _is_list(module):
        return [name]
    return [inner for key, each in module.named_children() for inner in _elements(f"{name}.{key}", each)]


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.state_dict(keep_vars=True))


def _expect_module(name: str, modules: Mapping[str, nn.Module]) -> None:
    if name not in modules or not name:
        raise UnknownName("module in Pipeline(stages=…)", name, [each for each in modules if each])
