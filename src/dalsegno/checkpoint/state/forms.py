"""Forms of wrapped tensors: class and context as text, which a load compares with the live tensor's.

The class comes from the program; nothing that a checkpoint names is imported or called.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, TypedDict

import torch

from dalsegno.errors import CannotSave

from .contract import Tensors, class_name_of, short_class_name

DEEPEST = 16
"""Levels of wrappers, and of a context."""

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


SHARDED = "sharded "
"""Before the class of a tensor whose parts only as many ranks can load."""


def form_of(tensor: torch.Tensor, context: object, parts: dict[str, Form | None], where: str) -> Form:
    """Form of a wrapped tensor. ``context``: what its parts do not contain; ``where``: its full name, for errors.

    Raises:
        CannotSave: for a context that cannot be compared.
    """
    return {
        "class": class_name_of(tensor),
        "shape": [size if type(size) is int else "ragged" for size in tensor.shape],
        "dtype": str(tensor.dtype),
        "context": _described(context, f"{where}: the context of its {type(tensor).__qualname__}", 0),
        "parts": parts,
    }


def describe_mismatch(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> str:
    """How a saved form differs from the live one; empty if a tensor of one can be loaded into the other.

    Modules between a class's package and its name do not count, since libraries move classes.
    """
    if saved is None or here is None:
        return "" if saved is here else f"saved as {_shown(saved)}, here {_shown(here)}"
    if short_class_name(saved["class"]) != short_class_name(here["class"]):
        return f"saved as {_shown(saved)}, here {_shown(here)}{_hint(saved, here)}"
    for key in ("shape", "dtype", "context"):
        if saved[key] != here[key]:
            difference = _first_difference(key, saved[key], here[key])
            return f"{here['class']} saved with {difference}{_hint(saved, here)}"
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


def _hint(*forms: Form | Mapping[str, Any]) -> str:
    is_sharded = any(form["class"].startswith(SHARDED) for form in forms)
    return "; the shards of a tensor that is quantized in blocks fit as many ranks as saved it" if is_sharded else ""


def _shown(form: Mapping[str, Any] | None) -> str:
    return "a plain tensor" if form is None else str(form["class"])


def _described(value: object, where: str, depth: int) -> Json:
    """``value`` as JSON from which equality is read, but nothing is built. Devices are equal: state may move."""
    if depth > DEEPEST:
        raise CannotSave(f"{where} is nested deeper than {DEEPEST} levels, or contains itself")
    if isinstance(value, enum.Enum):
        return f"{class_name_of(value)}.{value.name}"
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
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_described(each, where, depth + 1) for each in value]
    if isinstance(value, dict):
        return {str(key): _described(each, where, depth + 1) for key, each in value.items()}
    fields = _fields(value)
    if fields is None:
        raise CannotSave(
            f"{where} contains a {class_name_of(value)}, which cannot be compared on resume; a context may contain "
            "numbers, text, dtypes, enums, lists, dicts, dataclasses and plain objects of these"
        )
    return {"class": class_name_of(value)} | {key: _described(each, where, depth + 1) for key, each in fields.items()}


def _fields(value: Any) -> dict[str, object] | None:
    """Content of a named tuple, dataclass or object with attributes; None for one whose content is hidden."""
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        return None
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else None
