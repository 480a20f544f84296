"""Wrapped tensors: take a quantized or wrapped tensor apart into plain tensors that share its memory.

A checkpoint contains these parts, named below the tensor, and its :class:`Form`: class and context, as text. A load
writes into the parts of the live tensor, whose form must be the saved one. So the class comes from the program; nothing
that a checkpoint names is imported or called.

Two ways to take a tensor apart:

* torch's protocol for wrapper subclasses, ``__tensor_flatten__``: torchao, float8, ``NestedTensor``;
* ``take_apart(tensor)`` in ``dalsegno.interop.<library>.tensors``, for a class of that library without the protocol.

That module also has ``hidden_tensors(module)``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dalsegno.distributed.stage_places import like_parameter
from dalsegno.errors import CannotSave

from .contract import Tensors
from .dense import is_dense

Json = Any

Form = TypedDict("Form", {"class": str, "shape": list[Any], "dtype": str, "context": Any, "parts": dict[str, Any]})
"""Of a wrapped tensor: ``parts`` has the form of each part that is wrapped itself, None of the others, by the end of
its name."""


class Parts(NamedTuple):
    """A tensor as a checkpoint contains it.

    ``tensors``: plain ones that share its memory, by the end of their names: ``.scale``, or nothing for the tensor's
    own elements. ``form``: None for a plain tensor, which is its only part.
    """

    tensors: Tensors
    form: Form | None


class TakenApart(NamedTuple):
    """One level of a wrapped tensor: its parts by the end of their names, and what they do not contain."""

    parts: Mapping[str, torch.Tensor]
    context: object


OfLibrary = Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], object] | None]
"""Returns the fields of a :class:`TakenApart`; None for a tensor of another class."""


_DEEPEST = 16  # levels of wrappers, and of a context
_WITHOUT_KERNELS = {
    getattr(torch, name): torch.int16 if name == "bits16" else torch.uint8
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "bits8", "bits16", "bits1x8",
                 "bits2x4", "bits4x2")
    if hasattr(torch, name)
}  # fmt: skip
"""Dtypes that torch can neither copy nor compare, with the dtype as which it can."""


def parts_of(tensor: torch.Tensor, where: str) -> Parts:
    """The plain tensors of any tensor.

    Args:
        where: the tensor's full name, for errors.

    Raises:
        CannotSave: if ``tensor`` is neither plain nor can be taken apart.
    """
    return _parts_of(tensor, where, 0)


def _parts_of(tensor: torch.Tensor, where: str, depth: int) -> Parts:
    if is_dense(tensor):
        return Parts({"": tensor}, None)
    if isinstance(tensor, DTensor) and tensor.layout == torch.strided and not is_dense(tensor._local_tensor):
        raise CannotSave(
            f"{where}: cannot save a {type(tensor._local_tensor).__qualname__} that is sharded over the ranks; keep "
            "wrapped tensors whole on each rank, e.g. by fully_shard(…, ignored_params=…)"
        )
    taken = _take_apart(tensor) if depth < _DEEPEST and not isinstance(tensor, DTensor) else None
    if taken is None:
        raise CannotSave(
            f"{where}: cannot save a {type(tensor).__qualname__} with {tensor.layout}, {tensor.dtype} on "
            f"{tensor.device}; it must be a dense tensor or DTensor, or a subclass with __tensor_flatten__. "
            "Convert it (.to_dense(), .dequantize()), or register it with persistent=False if it is a buffer"
        )
    tensors: Tensors = {}
    inner: dict[str, Form | None] = {}
    for end, part in taken.parts.items():
        tensors_of_part, inner[end] = _parts_of(like_parameter(part, tensor), f"{where}{end}", depth + 1)
        tensors |= {f"{end}{further}": each for further, each in tensors_of_part.items()}
    form: Form = {
        "class": _name(type(tensor)),
        "shape": [size if type(size) is int else "ragged" for size in tensor.shape],
        "dtype": str(tensor.dtype),
        "context": _described(taken.context, f"{where}: the context of its {type(tensor).__qualname__}", 0),
        "parts": inner,
    }
    return Parts(tensors, form)


def _take_apart(tensor: torch.Tensor) -> TakenApart | None:
    if (of_library := _of_library(type(tensor))) is not None and (found := of_library(tensor)) is not None:
        return TakenApart(*found)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return TakenApart({f".{name}": getattr(tensor, name) for name in names}, context)
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype in _WITHOUT_KERNELS:
        return TakenApart({"": tensor.detach().view(_WITHOUT_KERNELS[tensor.dtype])}, None)
    return None


def _of_library(kind: type) -> OfLibrary | None:
    """``take_apart`` of the library that defines ``kind`` or one of its bases."""
    found: OfLibrary | None = getattr(_library_of(kind), "take_apart", None)
    return found


def _library_of(kind: type) -> ModuleType | None:
    packages = (each.__module__.partition(".")[0] for each in kind.__mro__)
    return next((found for package in packages if (found := _module_for(package)) is not None), None)


@functools.cache
def _module_for(package: str) -> ModuleType | None:
    module = f"dalsegno.interop.{package}.tensors"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
    return None


def hidden_tensors(model: nn.Module) -> Tensors:
    """Tensors of a library's modules that ``load_state_dict`` ignores or refuses, by name; loaded in place alone."""
    return {
        f"{prefix}{'.' if prefix else ''}{end}": tensor
        for prefix, module in model.named_modules()
        if (library := _library_of(type(module))) is not None
        for end, tensor in library.hidden_tensors(module).items()
    }


def describe_mismatch(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> str:
    """How a saved form differs from the live one; empty if a tensor of one can be loaded into the other.

    Modules between a class's package and its name do not count, since libraries move classes.
    """
    if saved is None or here is None:
        return "" if saved is here else f"saved as {_shown(saved)}, here {_shown(here)}"
    if _short(saved["class"]) != _short(here["class"]):
        return f"saved as {_shown(saved)}, here {_shown(here)}"
    for key in ("shape", "dtype", "context"):
        if saved[key] != here[key]:
            return f"{here['class']} saved with {_first_difference(key, saved[key], here[key])}"
    if saved["parts"].keys() != here["parts"].keys():
        return f"{here['class']} saved with the parts {[*saved['parts']]}, here {[*here['parts']]}"
    inner = (describe_mismatch(each, here["parts"][end]) for end, each in saved["parts"].items())
    return next(filter(None, inner), "")


def is_form(value: object) -> bool:
    """Whether ``value``, possibly read from disk, is a form."""
    if not isinstance(value, dict) or value.keys() != Form.__annotations__.keys():
        return False
    parts = value["parts"]
    return (
        isinstance(value["class"], str)
        and isinstance(parts, dict)
        and all(isinstance(end, str) and (each is None or is_form(each)) for end, each in parts.items())
    )


def ends(form: Mapping[str, Any] | None) -> Iterator[str]:
    """The ends of the names of a tensor's plain parts."""
    if form is None:
        yield ""
        return
    for end, inner in form["parts"].items():
        yield from (f"{end}{further}" for further in ends(inner))


def _first_difference(where: str, saved: Json, here: Json) -> str:
    if isinstance(saved, dict) and isinstance(here, dict):
        keys = [key for key in {**saved, **here} if saved.get(key) != here.get(key)]
        return _first_difference(f"{where}.{keys[0]}", saved.get(keys[0]), here.get(keys[0]))
    return f"{where} {saved}, here {here}"


def _shown(form: Mapping[str, Any] | None) -> str:
    return "a plain tensor" if form is None else str(form["class"])


def _short(class_name: str) -> str:
    return f"{class_name.partition('.')[0]}.{class_name.rpartition('.')[2]}"


def _name(thing: type | FunctionType) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _described(value: object, where: str, depth: int) -> Json:
    """``value`` as JSON from which equality is read, but nothing is built. Devices are equal: state may move."""
    if depth > _DEEPEST:
        raise CannotSave(f"{where} is nested deeper than {_DEEPEST} levels, or contains itself")
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, torch.SymInt):
        return "symbolic"
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, type | FunctionType):
        return _name(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_described(each, where, depth + 1) for each in value]
    if isinstance(value, dict):
        return {str(key): _described(each, where, depth + 1) for key, each in value.items()}
    fields = _fields(value)
    if fields is None:
        raise CannotSave(
            f"{where} contains a {_name(type(value))}, which cannot be compared on resume; a context may contain "
            "numbers, text, dtypes, enums, lists, dicts, dataclasses and plain objects of these"
        )
    return {"class": _name(type(value))} | {key: _described(each, where, depth + 1) for key, each in fields.items()}


def _fields(value: Any) -> dict[str, object] | None:
    """Content of a named tuple, dataclass or object with attributes; None for one whose content is hidden."""
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        return None
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else None
