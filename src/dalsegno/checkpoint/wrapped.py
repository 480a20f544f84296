"""Wrapped tensors: subclasses with ``__tensor_flatten__``, such as quantized weights, as the plain tensors inside them.

A checkpoint contains these parts, named below the tensor, and a :class:`WrapperSpec`: class and context as text, which
a load compares with those of the live tensor. A load writes into the parts of the live tensor. Its class comes from the
program; nothing that a checkpoint names is imported or called.

A tensor is taken apart by torch's protocol for wrapper subclasses, ``__tensor_flatten__`` (torchao, float8,
``NestedTensor``). The module ``dalsegno.interop.<library>`` may have, for the classes of that library:

* ``take_apart(tensor)``: its parts and context, instead of the protocol's;
* ``hidden_tensors(module)``: tensors of a module that its state dict does not have;
* ``new_state(optimizer, parameter, class_name, context)``: a tensor to load a wrapped state of its optimizers into.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dalsegno.checkpoint.contract import Tensors
from dalsegno.checkpoint.index import StoredTensor
from dalsegno.checkpoint.tensor_files import is_dense
from dalsegno.distributed.stage_places import like_parameter
from dalsegno.errors import CannotSave
from dalsegno.stateful.component import class_name_of, short_class_name
from dalsegno.stateful.schema import Must

DEEPEST = 16
"""Levels of wrappers, and of a context."""

Json = Any

WrapperSpec = TypedDict(
    "WrapperSpec", {"class": str, "shape": list[Any], "dtype": str, "context": Any, "parts": dict[str, Any]}
)
"""``parts`` has the spec of each part that is wrapped itself, None of the others, by the end of its name."""


class Parts(NamedTuple):
    """A tensor as a checkpoint contains it. ``tensors``: plain ones that share its memory, by the end of their names:
    ``.scale``, or nothing for the tensor's own elements. ``spec``: None for a plain tensor."""

    tensors: Tensors
    spec: WrapperSpec | None


SHARDED = "sharded "
"""Before the class of a tensor whose parts only as many ranks can load."""


def describe_mismatch(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> str:
    """How a saved spec differs from the live one; empty if a tensor of one can be loaded into the other. Modules
    between a class's package and its name do not count, since libraries move classes."""
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


def is_spec(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != WrapperSpec.__annotations__.keys():
        return False
    parts = value["parts"]
    return (
        isinstance(value["class"], str)
        and isinstance(parts, dict)
        and all(isinstance(end, str) and (each is None or is_spec(each)) for end, each in parts.items())
    )


SavedSpec = Annotated[Any, Must("the form of a wrapped tensor", is_spec)]
"""A spec that was read from disk."""


def ends(spec: Mapping[str, Any] | None) -> Iterator[str]:
    """The ends of the names of a tensor's plain parts."""
    if spec is None:
        yield ""
        return
    for end, inner in spec["parts"].items():
        yield from (f"{end}{further}" for further in ends(inner))


def _first_difference(where: str, saved: Json, here: Json) -> str:
    if isinstance(saved, dict) and isinstance(here, dict):
        keys = [key for key in {**saved, **here} if saved.get(key) != here.get(key)]
        return _first_difference(f"{where}.{keys[0]}", saved.get(keys[0]), here.get(keys[0]))
    return f"{where} {saved}, here {here}"


def _hint(*specs: WrapperSpec | Mapping[str, Any]) -> str:
    is_sharded = any(spec["class"].startswith(SHARDED) for spec in specs)
    return "; the shards of a tensor that is quantized in blocks fit as many ranks as saved it" if is_sharded else ""


def _shown(spec: Mapping[str, Any] | None) -> str:
    return "a plain tensor" if spec is None else str(spec["class"])


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


_WITHOUT_KERNELS = {
    getattr(torch, name): torch.int16 if name == "bits16" else torch.uint8
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "bits8", "bits16", "bits1x8",
                 "bits2x4", "bits4x2")
    if hasattr(torch, name)
}  # fmt: skip
"""Dtypes that torch can neither copy nor compare, with the dtype as which it can."""


def parts_of(tensor: torch.Tensor, where: str, depth: int = 0) -> Parts:
    """The plain tensors of any tensor. ``where``: its full name, for errors; ``depth``: levels of wrappers around
    it."""
    if is_dense(tensor):
        return Parts({"": tensor}, None)
    if isinstance(tensor, DTensor) and not is_dense(tensor._local_tensor):
        return of_all_ranks(tensor, parts_of(tensor._local_tensor, where, depth + 1), where)
    taken = _take_apart(tensor) if depth < DEEPEST else None
    if taken is None:
        raise CannotSave(
            f"{where}: cannot save a {type(tensor).__qualname__} with {tensor.layout}, {tensor.dtype} on "
            f"{tensor.device}; it must be a dense tensor or DTensor, or a subclass with __tensor_flatten__. "
            "Convert it (.to_dense(), .dequantize(), .as_subclass(torch.Tensor)), or register it with persistent=False "
            "if it is a buffer"
        )
    tensors: Tensors = {}
    inner: dict[str, WrapperSpec | None] = {}
    parts, context = taken
    for end, part in parts.items():
        tensors_of_part, inner[end] = parts_of(like_parameter(part, tensor), f"{where}{end}", depth + 1)
        tensors |= {f"{end}{further}": each for further, each in tensors_of_part.items()}
    spec: WrapperSpec = {
        "class": class_name_of(tensor),
        "shape": [size if type(size) is int else "ragged" for size in tensor.shape],
        "dtype": str(tensor.dtype),
        "context": _described(context, f"{where}: the context of its {type(tensor).__qualname__}", 0),
        "parts": inner,
    }
    return Parts(tensors, spec)


def _take_apart(tensor: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], object] | None:
    """One level of a wrapped tensor: its parts by the end of their names, and what they do not contain."""
    library: Any = _library_of(type(tensor))
    if library is not None and (found := library.take_apart(tensor)) is not None:
        parts, context = found
        return parts, context
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return {f".{name}": getattr(tensor, name) for name in names}, context
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype in _WITHOUT_KERNELS:
        return {"": tensor.detach().view(_WITHOUT_KERNELS[tensor.dtype])}, None
    return None


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


def of_all_ranks(whole: DTensor, shard: Parts, where: str) -> Parts:
    """The parts of a sharded tensor, as DTensors that share the memory of those of this rank's ``shard``, which is
    wrapped."""
    assert shard.spec is not None, "it is wrapped"
    cuts = [number for number, placement in enumerate(whole.placements) if not placement.is_replicate()]
    dimensions = [_cut_dimension(whole.placements[number], where) for number in cuts]
    if not cuts:
        return Parts({end: _joined(whole, part, part.shape) for end, part in shard.tensors.items()}, shard.spec)
    if dimensions == [0] and _has_parts_of_rows(shard, whole._local_tensor):
        rows = whole.shape[0]
        tensors = {end: _joined(whole, part, (rows, *part.shape[1:])) for end, part in shard.tensors.items()}
        return Parts(tensors, {**shard.spec, "shape": [*whole.shape]})
    sizes = [whole.device_mesh.size(number) for number in cuts]
    for dimension in {*dimensions}:
        count = math.prod(size for size, cut in zip(sizes, dimensions, strict=True) if cut == dimension)
        if whole.shape[dimension] % count:
            raise CannotSave(
                f"{where}: cannot save a {type(whole._local_tensor).__qualname__} whose {whole.shape[dimension]} rows "
                f"are sharded over {count} ranks: the shards differ in size. Use a size that {count} divides, or keep "
                "it whole on each rank, e.g. by fully_shard(…, ignored_params=…)"
            )
    tensors = {}
    for end, part in shard.tensors.items():
        part = part if part.dim() else part.view(1)
        tensors[end] = _joined(whole, part, (part.shape[0] * math.prod(sizes), *part.shape[1:]))
    spec: WrapperSpec = {
        "class": f"{SHARDED}{shard.spec['class']}",
        "shape": [*whole.shape],
        "dtype": shard.spec["dtype"],
        "context": {"mesh": [*whole.device_mesh.shape], "placements": [str(each) for each in whole.placements]},
        "parts": {"": shard.spec},
    }
    return Parts(tensors, spec)


def _cut_dimension(placement: Placement, where: str) -> int:
    if not isinstance(placement, Shard | _StridedShard):
        raise CannotSave(
            f"{where}: cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first"
        )
    return placement.dim


def _has_parts_of_rows(shard: Parts, local: torch.Tensor) -> bool:
    return all(part.dim() and part.shape[0] == local.shape[0] for part in shard.tensors.values()) and not any(
        shard.spec["parts"].values() if shard.spec else ()
    )


def _joined(whole: DTensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The parts of all ranks as one tensor of ``shape``. Not by ``from_local``, which moves a part to the mesh's device
    if the shard was offloaded: a load would fill a copy."""
    placements: Sequence[Placement] = [each if each.is_replicate() else Shard(0) for each in whole.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    spec = DTensorSpec(whole.device_mesh, tuple(placements), TensorMeta(torch.Size(shape), stride, part.dtype))
    return DTensor(part.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


# --- states of optimizers -----------------------------------------------------------------------------------------

Specs = Mapping[str, WrapperSpec]
"""Of a parameter's wrapped states, by kind."""

Stored = Mapping[str, StoredTensor | torch.Tensor]
"""Of a parameter: the saved tensors, by kind; those of wrapped states by the kinds of their parts."""


def create_states(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, specs: Specs, stored: Stored
) -> tuple[dict[str, torch.Tensor], Tensors, list[str]]:
    """Tensors to load the wrapped states of a parameter into, by kind; their parts; and how the saved states differ, a
    line each. An optimizer has none before its first step."""
    states: dict[str, torch.Tensor] = {}
    tensors: Tensors = {}
    lines = []
    for kind, spec in specs.items():
        states[kind] = _new_state(optimizer, parameter, spec)
        parts, here = parts_of(states[kind], kind)
        tensors |= {f"{kind}{end}": part for end, part in parts.items()}
        if difference := describe_mismatch(spec, here):
            lines.append(f"{kind}: {difference}")
            continue
        for end, part in parts.items():
            there = stored[f"{kind}{end}"]
            if (there.shape, there.dtype) != (part.shape, part.dtype):
                found = f"{[*there.shape]} {there.dtype}, here {[*part.shape]} {part.dtype}"
                lines.append(f"{kind}{end}: saved as {found}")
    return states, tensors, lines


def _new_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, spec: WrapperSpec) -> torch.Tensor:
    """A state as the optimizer would create it: of the parameter's class, or of one of the optimizer's library."""
    inner = spec["parts"][""] if spec["class"].startswith(SHARDED) else spec
    new_state = getattr(_library_of(type(optimizer)), "new_state", None)
    if new_state is not None and isinstance(inner["context"], dict):
        state: torch.Tensor | None = new_state(optimizer, parameter, inner["class"], inner["context"])
        if state is not None:
            return state
    return torch.zeros_like(parameter.detach())
