"""Wrapped tensors: take a quantized or wrapped tensor apart into plain tensors that share its memory.

A checkpoint contains these parts, named below the tensor, and its :class:`Form`. A load writes into the parts of the
live tensor, whose form must be the saved one.

Four ways to take a tensor apart:

* ``take_apart(tensor)`` in ``dalsegno.interop.<library>``, for a class of that library without the protocol;
* torch's protocol for wrapper subclasses, ``__tensor_flatten__``: torchao, float8, ``NestedTensor``;
* a wrapper subclass without that has the tensors among its attributes, and the other attributes as context;
* a subclass that wraps nothing has its own elements, and its attributes as context.

The module of the first way also has ``hidden_tensors(module)``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dalsegno.distributed.stage_places import like_parameter
from dalsegno.errors import CannotSave

from .contract import Tensors
from .dense import is_dense
from .forms import DEEPEST, Form, Parts, form_of
from .wrapped_shards import of_all_ranks


class TakenApart(NamedTuple):
    """One level of a wrapped tensor: its parts by the end of their names, and what they do not contain."""

    parts: Mapping[str, torch.Tensor]
    context: object


OfLibrary = Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], object] | None]
"""Returns the fields of a :class:`TakenApart`; None for a tensor of another class."""


_WITHOUT_KERNELS = {
    getattr(torch, name): torch.int16 if name == "bits16" else torch.uint8
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "bits8", "bits16", "bits1x8",
                 "bits2x4", "bits4x2")
    if hasattr(torch, name)
}  # fmt: skip
"""Dtypes that torch can neither copy nor compare, with the dtype as which it can."""


def parts_of(tensor: torch.Tensor, where: str, depth: int = 0) -> Parts:
    """The plain tensors of any tensor. ``where``: its full name, for errors; ``depth``: levels of wrappers around it.

    Raises:
        CannotSave: if ``tensor`` is neither plain nor can be taken apart.
    """
    if is_dense(tensor):
        return Parts({"": tensor}, None)
    if isinstance(tensor, DTensor) and not is_dense(tensor._local_tensor):
        return of_all_ranks(tensor, parts_of(tensor._local_tensor, where, depth + 1), where)
    taken = _take_apart(tensor) if depth < DEEPEST else None
    if taken is None:
        raise CannotSave(
            f"{where}: cannot save a {type(tensor).__qualname__} with {tensor.layout}, {tensor.dtype} on "
            f"{tensor.device}; it must be a dense tensor or DTensor, or a subclass with __tensor_flatten__. "
            "Convert it (.to_dense(), .dequantize()), or register it with persistent=False if it is a buffer"
        )
    tensors: Tensors = {}
    inner: dict[str, Form | None] = {}
    for end, part in taken.parts.items():
        tensors_of_part, inner[end] = parts_of(like_parameter(part, tensor), f"{where}{end}", depth + 1)
        tensors |= {f"{end}{further}": each for further, each in tensors_of_part.items()}
    return Parts(tensors, form_of(tensor, taken.context, inner, where))


def _take_apart(tensor: torch.Tensor) -> TakenApart | None:
    of_library: OfLibrary | None = getattr(_library_of(type(tensor)), "take_apart", None)
    if of_library is not None and (found := of_library(tensor)) is not None:
        return TakenApart(*found)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return TakenApart({f".{name}": getattr(tensor, name) for name in names}, context)
    if type(tensor) in (torch.Tensor, nn.Parameter):
        if tensor.dtype in _WITHOUT_KERNELS:
            return TakenApart({"": tensor.detach().view(_WITHOUT_KERNELS[tensor.dtype])}, None)
    elif type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not is_lazy(tensor):
        return TakenApart({"": tensor.detach().as_subclass(torch.Tensor)}, vars(tensor))
    else:
        return _attributes_of(tensor)
    return None


def _attributes_of(tensor: torch.Tensor) -> TakenApart | None:
    """What ``torch.save`` would pickle of a wrapper; None without tensors in it, or if a slot may hide one."""
    attributes = vars(tensor)
    parts = {f".{name}": each for name, each in attributes.items() if isinstance(each, torch.Tensor)}
    bases = type(tensor).__mro__[: type(tensor).__mro__.index(torch.Tensor)]
    if not parts or any("__slots__" in vars(base) for base in bases):
        return None
    return TakenApart(parts, {name: each for name, each in attributes.items() if f".{name}" not in parts})


def _library_of(kind: type) -> ModuleType | None:
    """``dalsegno.interop.<library>`` of the library that defines ``kind`` or one of its bases, if it has
    ``take_apart``."""
    packages = (each.__module__.partition(".")[0] for each in kind.__mro__)
    return next((found for package in packages if (found := _module_for(package)) is not None), None)


@functools.cache
def _module_for(package: str) -> ModuleType | None:
    name = f"dalsegno.interop.{package}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None
    return module if hasattr(module, "take_apart") else None


def hidden_tensors(model: nn.Module) -> Tensors:
    """Tensors of a library's modules, by name, that ``load_state_dict`` ignores or refuses: loaded in place only."""
    kinds = {type(module) for module in model.modules()}
    libraries = {kind: library for kind in kinds if (library := _library_of(kind)) is not None}
    return {
        f"{prefix}{'.' if prefix else ''}{end}": tensor
        for prefix, module in (model.named_modules() if libraries else ())
        if type(module) in libraries
        for end, tensor in libraries[type(module)].hidden_tensors(module).items()
    }
