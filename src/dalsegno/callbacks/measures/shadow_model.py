"""Shadow models: a copy of a model's structure over fake tensors, to trace a step by its shapes.

A shadow takes almost no memory, and changes to it do not affect the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from dalsegno.distributed.stage_places import place_of

_LARGEST_KEPT = 1 << 20  # elements

_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hooks" in name}
_GLOBAL_HOOKS = [
    value for name, value in vars(torch_modules).items() if name.startswith("_global_") and "hooks" in name
]


def shadow_of(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of the model on fake tensors, without wrappers (torch.compile, DDP, FSDP2) and without hooks.

    Sharded or quantized parameters become whole, plain ones; tied parameters stay tied, frozen ones frozen. Modules'
    other attributes are copied, so that a forward may change them; those that cannot be copied are shared.
    """
    modules = list(model.modules())
    known: dict[int, Any] = {id(each): object.__new__(_class_of(each)) for each in modules if _inside(each) is None}
    for module in reversed(modules):  # a wrapped module comes after its wrapper
        if (inner := _inside(module)) is not None:
            known[id(module)] = known[id(inner)]
    for tensor in (*model.parameters(), *model.buffers()):
        known[id(tensor)] = without_data(tensor, mode)
    with _CopiesWithoutData(mode):
        for module in modules:
            if _inside(module) is None:
                _fill(known[id(module)], module, known)
    shadow: nn.Module = known[id(model)]
    for module in shadow.modules():
        if isinstance(module, nn.Linear) and not _is_plain(module):
            _dequantize(module, mode)
    return shadow


def without_data(tree: Any, mode: FakeTensorMode) -> Any:
    """Replace tensors with fake ones of the same shape, dtype and device.

    Integer tensors, whose values may decide a forward's control flow (masks, lengths, counts), are copied with data.
    """
    return tree_map_only(Tensor, lambda each: _without_data(each, mode), tree)


@contextmanager
def no_global_hooks() -> Iterator[None]:
    """Disable hooks that are registered for all modules."""
    held = [dict(hooks) for hooks in _GLOBAL_HOOKS]
    for hooks in _GLOBAL_HOOKS:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(_GLOBAL_HOOKS, held, strict=True):
            hooks.update(before)


def _without_data(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if is_whole and type(tensor) is Tensor and tensor.numel() <= _LARGEST_KEPT:
        return tensor.detach().clone()
    place = place_of(tensor)
    device = tensor.device if place is None else place.device
    with mode:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.layout == torch.strided:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's class; for FSDP2's derived class, the original one."""
    return next(
        each for each in type(module).__mro__ if issubclass(each, nn.Module) and not issubclass(each, FSDPModule)
    )


def _inside(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None if the module is not a wrapper."""
    is_parallel = isinstance(module, DistributedDataParallel | DataParallel)
    return module._modules.get("module" if is_parallel else "_orig_mod")  # the latter is torch.compile's


def _fill(shadow: nn.Module, module: nn.Module, known: dict[int, Any]) -> None:
    for name, value in vars(module).items():
        if name in _NO_HOOKS:
            shadow.__dict__[name] = copy.copy(_NO_HOOKS[name])
        elif name != "_compiled_call_impl":
            try:
                shadow.__dict__[name] = copy.deepcopy(value, known)
            except Exception:  # locks, process groups and the like cannot be copied
                shadow.__dict__[name] = value


class _CopiesWithoutData(TorchFunctionMode):
    """Makes ``deepcopy`` of a tensor copy no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__deepcopy__:
            return _without_data(args[0], self._mode)
        return function(*args, **(kwargs or {}))


class _Dequantized(nn.Linear):
    """Stands in for a quantized linear layer, which computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def _is_plain(module: nn.Linear) -> bool:
    weight = module._parameters.get("weight")
    return weight is None or (weight.shape == (module.out_features, module.in_features) and weight.is_floating_point())


def _dequantize(module: nn.Linear, mode: FakeTensorMode) -> None:
    with mode:
        weight = torch.empty(module.out_features, module.in_features, device=module.weight.device)
    module.__class__ = _Dequantized
    module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
