"""FLOPs of a model's training step, counted from shapes without running the model.

Counts matrix products, convolutions and attention (in full, even where a mask leaves out half of it), two operations
per multiply-add; forward, and backward as far as needed: frozen weights have no gradient, nor has anything before the
first trained weight. Recomputation by activation checkpointing or by an attention kernel does not count: the result is
model FLOPs, as in Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dalsegno.distributed.rng import seeded_generators
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.distributed.stage_places import place_of


class Uncountable(Exception):
    """A step of this model cannot be traced by its shapes; the message gives the reason."""


def count_flops(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None = None
) -> int:
    """Count the FLOPs of ``model(*args, **kwargs)`` and of the backward pass of its loss.

    Does not change the model, its arguments or random generators; runs no hook, and compiles nothing. The loss is the
    model's returned loss, else the sum of what it returns, whose backward pass costs the same. Under FSDP2 the whole
    model is counted. Raises Uncountable if the forward depends on the values of fake tensors, or uses an operation
    without a formula.
    """
    device = device_of(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as held:
        held.enter_context(seeded_generators(0, device))
        held.enter_context(no_global_hooks())
        held.enter_context(torch.compiler.set_stance("force_eager"))
        held.enter_context(torch.enable_grad())
        try:
            shadow = shadow_of(model, mode)
            args, kwargs = without_data((list(args), dict(kwargs)), mode)
            counter = _Counter()
            with mode, counter:
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    loss = _loss(shadow(*args, **kwargs))
                if loss is not None:
                    counter.backward(loss)
        except Uncountable:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise Uncountable(f"{type(error).__name__}: {lines[0] if lines else ''}") from error
    return counter.flops


def _loss(returned: Any) -> Tensor | None:
    """Return the tensor to call backward on; None if nothing needs a gradient."""
    whole = dict(returned) if isinstance(returned, Mapping) else returned
    named = whole.get("loss") if isinstance(whole, dict) else getattr(whole, "loss", None)
    found = [named] if isinstance(named, Tensor) else tree_leaves(whole)
    sums = [each.sum() for each in found if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([each.float() for each in sums]).sum() if sums else None


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of all operations that run inside, on fake tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._is_backward = False

    def backward(self, loss: Tensor) -> None:
        self._is_backward = True
        loss.backward()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        real = [each for each in tensors if not isinstance(each, FakeTensor)]
        if any(each.requires_grad for each in real):
            raise Uncountable("its forward uses a tensor of the model other than through its modules")
        if real and len(real) == len(tensors):  # integers only, whose values may be read
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        result = _grouped(function, args, kwargs) if function in _GROUPED else function(*args, **kwargs)
        is_recomputed = self._is_backward and torch.is_grad_enabled()  # by activation checkpointing
        self.flops += 0 if is_recomputed else _flops_of(function, args, kwargs, result)
        return result


_Formula = Callable[..., int]
"""The FLOPs of an operation, from its arguments."""

_GROUPED = {torch.ops.aten._grouped_mm.default}


def _grouped(function: Any, args: Any, kwargs: Any) -> Any:
    """Run as bf16: torch's fake kernel accepts no other dtype, though its real kernels do."""
    cast = tree_map_only(Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, (args, kwargs))
    return function(*cast[0], **cast[1]).to(args[0].dtype)


def _flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = function.name().partition(".")[0]
    if (formula := _FORMULAS.get(name)) is not None:
        return formula(*args, **kwargs)
    packet = getattr(function, "_overloadpacket", function)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if name in _WITHOUT_FORMULA or name.partition("::")[0] not in _NO_PRODUCTS:
        raise Uncountable(f"{name} has no formula (torch.utils.flop_counter.register_flop_formula gives it one)")
    return 0


def _matrix(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    """Product of two matrices, or of groups of matrices, stacked along the first or the last dimension."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _vector(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * a.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    """Queries (..., heads, length, width); keys and values may have fewer heads."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _recurrent(x: Tensor, weights: Sequence[Tensor], *rest: Any, **named: Any) -> int:
    """cuDNN's recurrent layers: inputs (..., width), and for each layer the matrices of inputs and states."""
    return 2 * math.prod(x.shape[:-1]) * sum(each.numel() for each in weights if each.dim() == 2)


def _recurrent_layer(x: Tensor, inputs: Tensor, states: Tensor, *rest: Any, **named: Any) -> int:
    return _recurrent(x, [inputs, states])


def _after_first(formula: _Formula) -> _Formula:
    """The formula without an operation's first argument: a tensor that is added, or a gradient."""
    return lambda first, *args, **named: formula(*args, **named)


def _twice(formula: _Formula) -> _Formula:
    """For a backward pass. (torch's formulas for attention also count the scores, which the kernel recomputes.)"""
    return lambda *args, **named: 2 * formula(*args, **named)


_ATTENTION_BACKWARD = _twice(_after_first(_attention))
_MATRIX = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2", "_int_mm")
_KERNELS = (
    *("flash_attention", "efficient_attention", "cudnn_attention"),
    *("flash_attention_for_cpu", "fused_attention_overrideable"),
)
_FORMULAS: Mapping[str, _Formula] = {
    **{f"aten::{name}": _matrix for name in _MATRIX},
    **{f"aten::{name}": _after_first(_matrix) for name in ("addmm_", "addbmm", "addbmm_", "baddbmm_")},
    **{f"aten::{name}": _vector for name in ("mv", "dot", "vdot")},
    **{f"aten::{name}": _after_first(_vector) for name in ("addmv", "addmv_")},
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _twice(_recurrent),
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::mkldnn_rnn_layer_backward": _twice(_recurrent_layer),
    "transformers::grouped_mm_fallback": _matrix,
    "transformers::grouped_mm_fallback_backward": _twice(_after_first(_matrix)),
    "flex_attention": _attention,
    "flex_attention_backward": _twice(_attention),
    **{f"aten::_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"aten::_scaled_dot_product_{kernel}_backward": _ATTENTION_BACKWARD for kernel in _KERNELS},
}
"""Formulas by operation, for those that torch's table lacks or counts differently."""

_NO_PRODUCTS = {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler"}
"""Namespaces without matrix products, except operations with a formula, and these:"""
_WITHOUT_FORMULA = {"aten::_trilinear", "aten::miopen_rnn", "aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm"}


_LARGEST_KEPT = 1 << 20  # elements

_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hooks" in name}
_GLOBAL_HOOKS = [each for name, each in vars(torch_modules).items() if name.startswith("_global_") and "hooks" in name]


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
    kinds = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in kinds if not issubclass(each, FSDPModule))


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
