"""Encode state trees as JSON and tensors, and decode them bit by bit. Decoding never runs code.

Values that JSON has are stored as they are. Any other value is an object whose first key begins with ``$``, such as
``{"$tuple": [1, 2]}`` or ``{"$tensor": "history[3]", "dtype": "float32", "shape": [3]}``; the tensor's bytes are stored
under that name in the file of tensors beside the JSON. Unusual ``strides`` are named there, too. Tensors are decoded on
the CPU. Tensors that share memory, such as one under two names, are stored once, as bytes, and decoded as views of it:
``{"$view": {"$tensor": …}, "offset": 0, "bytes": 48}``.
"""

from __future__ import annotations

import base64
import enum
import math
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.tensor_files import DTYPES, is_plain, is_shape, name_of
from dalsegno.errors import CannotSave, DamagedCheckpoint
from dalsegno.stateful.component import State

Json = Any
Array = np.ndarray[Any, Any]
Value = torch.Tensor | Array
Arrays = dict[str, torch.Tensor]
ReadArray = Callable[[str, torch.dtype, list[int]], torch.Tensor]

DEEPEST = 100
"""Levels of nesting. A deeper state, or one that contains itself, is refused."""

_ALLOWED = (
    "a state may contain dict, OrderedDict and Counter (with str or int keys), list, deque, tuple, str, bytes, bool, "
    "int, float, None, numpy scalars and arrays, torch tensors, torch.Size, torch.dtype and torch.device"
)
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcmM]\d{1,2}(\[\d{0,9}[a-zA-Z]{1,2}\])?")


def encode(tree: State, where: str) -> tuple[Json, Arrays]:
    """Encode ``tree`` as JSON, and its arrays and tensors by their path: ``history[3]``. They may share memory with the
    tree: copy them before training continues. ``where``: key of its component, for messages."""
    found = _Found(where, {}, [])
    encoded = _encode(tree, where, found, 0)
    found.share_memory()
    return encoded, found.arrays


def inside(where: str, key: object) -> str:
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{key!r}]"


# --- encoding: by exact type; subclasses are refused --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """Arrays found so far in the state of the component ``whose``, and each with its JSON."""

    whose: str
    arrays: Arrays
    values: list[tuple[Value, dict[str, Json]]]

    def add(self, value: Value, stored: torch.Tensor, where: str, tag: str, dtype: str) -> Json:
        """JSON of ``value``, of which ``stored`` has the elements in order."""
        name = where.removeprefix(self.whose).removeprefix(".")
        while name in self.arrays:
            name += "'"
        self.arrays[name] = stored
        entry = {tag: name, "dtype": dtype, "shape": list(value.shape)}
        if (strides := unusual_strides(value)) is not None:
            entry["strides"] = strides
        self.values.append((value, entry))
        return entry

    def share_memory(self) -> None:
        for overlap in overlaps([value for value, _ in self.values]):
            _, first = self.values[min(overlap.numbers)]
            name = first[next(iter(first))]
            for number, offset in zip(overlap.numbers, overlap.offsets, strict=True):
                value, entry = self.values[number]
                tag = next(iter(entry))
                del self.arrays[entry[tag]]
                view = {**entry, tag: name, "strides": [*strides_of(value)]}
                entry.clear()
                entry |= {"$view": view, "offset": offset, "bytes": len(overlap.memory)}
            self.arrays[name] = overlap.memory


def _encode(value: State, where: str, found: _Found, depth: int) -> Json:
    if depth > DEEPEST:
        raise CannotSave(f"{where}: nested deeper than {DEEPEST} levels, or contains itself")
    if value is None or type(value) is bool:
        return value
    if isinstance(value, np.generic):
        return _encode_numpy_scalar(value, where)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, found, depth)
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise CannotSave(_refusal(value, where))
    return encoder(value, where, found, depth)


def _encode_str(value: str, *_: object) -> Json:
    if value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


def _encode_int(value: int, *_: object) -> Json:
    return value if -(1 << 63) <= value < 1 << 64 else {"$int": hex(value)}


def _encode_dict(value: dict[Any, Any], where: str, found: _Found, depth: int) -> Json:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise CannotSave(f"{where}: cannot save a dict with the key {key!r}, a {_class(key)}; {_ALLOWED}")
    if depth < DEEPEST and _are_plain(value.values()):
        items = dict(value)
    else:
        items = {key: _encode(each, inside(where, key), found, depth + 1) for key, each in value.items()}
    if all(type(key) is str and not key.startswith("$") and type(_key_as_json(key)) is str for key in items):
        return items
    return {"$dict": [[_key_as_json(key), each] for key, each in items.items()]}


def _key_as_json(key: str | int) -> Json:
    return _encode_str(key) if isinstance(key, str) else _encode_int(key)


def _encode_list(value: list[Any], where: str, found: _Found, depth: int) -> Json:
    if depth < DEEPEST and _are_plain(value):
        return value.copy()
    return [_encode(each, f"{where}[{number}]", found, depth + 1) for number, each in enumerate(value)]


def _are_plain(values: Collection[Any]) -> bool:
    """Whether they are all names, or all numbers, that JSON has as they are: a fast path for thousands of them."""
    kinds = {*map(type, values)}
    return (
        (kinds == {str} and "".join(values).isascii())
        or (kinds == {int} and -(1 << 63) <= min(values) <= max(values) < 1 << 64)
        or (kinds == {float} and all(map(math.isfinite, values)))
    )


def _encode_size(value: torch.Size, where: str, found: _Found, depth: int) -> Json:
    sizes = [int(size) for size in value]
    if not is_shape(sizes):
        raise CannotSave(f"{where}: cannot save a torch.Size of {sizes}, which no tensor can have; save a tuple")
    return {"$size": sizes}


def _encode_numpy_scalar(value: np.generic[Any], where: str) -> Json:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
        raise CannotSave(f"{where}: cannot save a numpy {value.dtype}; {_ALLOWED}")
    return {"$scalar": value.dtype.str, "hex": value.tobytes().hex()}


def _encode_array(value: np.ndarray[Any, Any], where: str, found: _Found, depth: int) -> Json:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
        raise CannotSave(f"{where}: cannot save a numpy array of {value.dtype}; {_ALLOWED}")
    own = np.array(value, order="C", copy=True)
    try:
        tensor = torch.from_numpy(own)
    except (TypeError, ValueError):  # a dtype that torch lacks: other byte orders, long doubles, dates
        tensor = torch.from_numpy(np.frombuffer(own.tobytes(), dtype=np.uint8).copy())
    return found.add(value, tensor, where, "$array", value.dtype.str)


def _encode_tensor(value: torch.Tensor, where: str, found: _Found, depth: int) -> Json:
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        raise CannotSave(
            f"{where}: cannot save a {_class(value)}, only plain tensors; take its full_tensor() or to_local() first"
        )
    if not is_plain(value):
        raise CannotSave(
            f"{where}: cannot save a tensor with {value.layout}, {value.dtype} on {value.device}; "
            f"it must be dense (.to_dense(), .dequantize()), and of one of {', '.join(DTYPES)}"
        )
    entry = found.add(value, value.detach(), where, "$tensor", name_of(value.dtype))
    if value.requires_grad and value.is_leaf:
        entry["requires_grad"] = True
    if type(value) is torch.nn.Parameter:
        entry["parameter"] = True
    return entry


_ENCODERS: dict[type, Callable[[Any, str, _Found, int], Json]] = {
    str: _encode_str,
    int: _encode_int,
    float: lambda value, *_: value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()},
    bytes: lambda value, *_: {"$bytes": base64.b64encode(value).decode()},
    dict: _encode_dict,
    OrderedDict: lambda value, *place: {"$ordered": _encode_dict(value, *place)},
    Counter: lambda value, *place: {"$counter": _encode_dict(dict(value), *place)},  # MultiStepLR's milestones are one
    list: _encode_list,
    deque: lambda value, *place: {"$deque": _encode_list([*value], *place), "maxlen": value.maxlen},
    tuple: lambda value, *place: {"$tuple": _encode_list(list(value), *place)},
    torch.Size: _encode_size,
    torch.dtype: lambda value, *_: {"$dtype": name_of(value)},
    torch.device: lambda value, *_: {"$device": str(value)},
    np.ndarray: _encode_array,
}


def _class(value: object) -> str:
    return type(value).__qualname__


def _refusal(value: object, where: str) -> str:
    hint = ""
    if isinstance(value, enum.Enum):
        hint = "save its .name or .value; "
    elif isinstance(value, set | frozenset):
        hint = "save sorted(it); "
    elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
        hint = (
            "save its state, and set it in load_state_dict of an object that holds the generator: getstate() and "
            "setstate() of random's, bit_generator.state of NumPy's, get_state() and set_state() of torch's; "
        )
    elif isinstance(value, dict | list | tuple | str | int | float):
        base = next(kind for kind in (dict, list, tuple, str, int, float) if isinstance(value, kind))
        hint = f"it would be loaded as a {base.__name__}, so save {base.__name__}(it); "
    elif callable(value):
        hint = "code is never saved; "
    return f"{where}: cannot save a {_class(value)}; {hint}{_ALLOWED}"


# --- decoding: the input may be hostile, so each function checks it ------------------------------------------------


def decode(content: Json, read_array: ReadArray, where: str) -> State:
    """Decode the JSON that :func:`encode` returned. ``read_array``: returns the tensor of a name, dtype and shape."""
    return _decode(content, _Stored(read_array), where, 0)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored arrays, and what of their common memory is decoded already."""

    read: ReadArray
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    views: dict[str, Value] = field(default_factory=dict)


def _decode(json: Json, stored: _Stored, where: str, depth: int) -> State:
    if depth > DEEPEST:  # encode() refuses it
        raise DamagedCheckpoint(f"{where}: nested too deeply")
    if isinstance(json, list):
        return [_decode(each, stored, f"{where}[{number}]", depth + 1) for number, each in enumerate(json)]
    if not isinstance(json, dict):
        return json
    tag = next(iter(json), "")
    if not tag.startswith("$"):
        return {key: _decode(each, stored, inside(where, key), depth + 1) for key, each in json.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise DamagedCheckpoint(f"{where}: {tag!r} is unknown to this version of dalsegno")
    try:
        return decoder(json, stored, where, depth)
    except DamagedCheckpoint:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, struct.error) as error:
        raise DamagedCheckpoint(f"{where}: invalid {tag!r} ({error!r})") from error


def _decode_dict(json: Json, stored: _Stored, where: str, depth: int) -> dict[Any, Any]:
    result = {}
    for key, each in json["$dict"]:
        key = _decode(key, stored, where, depth)
        if type(key) is not str and type(key) is not int:
            raise TypeError(f"a key {key!r}")
        result[key] = _decode(each, stored, inside(where, key), depth + 1)
    return result


def _decode_as(kind: type, json: Json, stored: _Stored, where: str, depth: int) -> Any:
    decoded = _decode(json, stored, where, depth)
    if type(decoded) is not kind:
        raise TypeError(f"not a {kind.__name__}")
    return decoded


def _decode_dtype(json: Json, stored: _Stored, where: str, depth: int) -> torch.dtype:
    found = getattr(torch, json["$dtype"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError("not a dtype of this torch")
    return found


def _decode_numpy_scalar(json: Json, stored: _Stored, where: str, depth: int) -> np.generic[Any]:
    (value,) = np.frombuffer(bytes.fromhex(json["hex"]), dtype=_numpy_dtype(json["$scalar"]))
    return value  # type: ignore[no-any-return]


def _decode_array(json: Json, stored: _Stored, where: str, depth: int) -> np.ndarray[Any, Any]:
    dtype, shape = _numpy_dtype(json["dtype"]), _shape(json["shape"])
    count = math.prod(shape) * dtype.itemsize
    raw = stored.read(json["$array"], torch.uint8, [count]).numpy().tobytes()
    values = np.frombuffer(raw, dtype=dtype).reshape(shape)
    return array_with(_strides(json), values) if "strides" in json else values.copy()


def _decode_tensor(json: Json, stored: _Stored, where: str, depth: int) -> torch.Tensor:
    values = stored.read(json["$tensor"], DTYPES[json["dtype"]], _shape(json["shape"]))
    return _with_gradient(tensor_with(_strides(json), values) if "strides" in json else values.clone(), json)


def _decode_view(json: Json, stored: _Stored, where: str, depth: int) -> Value:
    identity = repr(json)
    if identity not in stored.views:
        view, offset = json["$view"], json["offset"]
        name = view["$tensor"] if "$tensor" in view else view["$array"]
        if name not in stored.memory:
            stored.memory[name] = stored.read(name, torch.uint8, _shape([json["bytes"]])).clone()
        shape, strides = _shape(view["shape"]), _strides(view)
        stored.views[identity] = (
            _with_gradient(tensor_in(stored.memory[name], offset, DTYPES[view["dtype"]], shape, strides), view)
            if "$tensor" in view
            else array_in(stored.memory[name], offset, _numpy_dtype(view["dtype"]), shape, strides)
        )
    return stored.views[identity]


def _with_gradient(tensor: torch.Tensor, json: Json) -> torch.Tensor:
    is_wanted = json.get("requires_grad", False)
    return torch.nn.Parameter(tensor, is_wanted) if json.get("parameter") else tensor.requires_grad_(is_wanted)


_DECODERS: dict[str, Callable[[Any, _Stored, str, int], State]] = {
    "$str": lambda json, *_: base64.b64decode(json["$str"], validate=True).decode("utf-8", "surrogatepass"),
    "$int": lambda json, *_: int(json["$int"], 16),
    "$float": lambda json, *_: struct.unpack(">d", bytes.fromhex(json["$float"]))[0],
    "$bytes": lambda json, *_: base64.b64decode(json["$bytes"], validate=True),
    "$dict": _decode_dict,
    "$ordered": lambda json, *place: OrderedDict(_decode_as(dict, json["$ordered"], *place)),
    "$counter": lambda json, *place: Counter(_decode_as(dict, json["$counter"], *place)),
    "$deque": lambda json, *place: deque(_decode_as(list, json["$deque"], *place), json["maxlen"]),
    "$tuple": lambda json, *place: tuple(_decode_as(list, json["$tuple"], *place)),
    "$size": lambda json, *_: torch.Size(_shape(json["$size"])),
    "$dtype": _decode_dtype,
    "$device": lambda json, *_: torch.device(json["$device"]),
    "$scalar": _decode_numpy_scalar,
    "$array": _decode_array,
    "$tensor": _decode_tensor,
    "$view": _decode_view,
}


def _shape(value: Json) -> list[int]:
    if not is_shape(value):
        raise ValueError("not a shape")
    return list(value)


def _strides(json: Json) -> list[int]:
    if not are_strides(json["strides"], json["shape"]):
        raise ValueError("not the strides of that shape")
    return list(json["strides"])


def _numpy_dtype(name: Json) -> np.dtype[Any]:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError("not a dtype of numbers")
    return np.dtype(name)


# --- how tensors and arrays lie in memory ---------------------------------------------------------------------------
# A file has the elements in order. Strides change how an operation rounds, so unusual ones are recorded, and a load
# lays the elements out again. Of values that overlap, a file has the common memory once, as bytes, and each value is a
# view of it: what changes one in place changes all, as before.

_WIDEST = 16  # bytes of an element; common memory is a multiple, so that it can be viewed as any dtype
_FARTHEST = 1 << 48


def strides_of(value: Value) -> tuple[int, ...]:
    """In elements of a tensor, in bytes of an array."""
    return value.stride() if isinstance(value, torch.Tensor) else value.strides


def unusual_strides(value: Value) -> list[int] | None:
    """As :func:`strides_of`; None if the elements follow each other in order."""
    is_contiguous = value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous
    if is_contiguous and 1 not in value.shape:  # where the size is 1, any stride is one
        return None
    strides, step = strides_of(value), 1 if isinstance(value, torch.Tensor) else value.itemsize
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        if stride != step:
            return list(strides) if 0 not in value.shape else None
        step *= size
    return None


def are_strides(strides: object, shape: Sequence[int]) -> bool:
    """Whether ``strides``, possibly read from disk, have one for each dimension, on which no arithmetic overflows."""
    return (
        isinstance(strides, list)
        and len(strides) == len(shape)
        and all(type(stride) is int and abs(stride) < _FARTHEST for stride in strides)
    )


def tensor_with(strides: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    _fill(copy, values)
    return copy


def array_with(strides: Sequence[int], values: Array) -> Array:
    before, after = _reach(values.shape, strides)
    memory = torch.empty(after - before + values.itemsize, dtype=torch.uint8)
    copy = array_in(memory, -before, values.dtype, values.shape, strides)
    copy[...] = values
    return copy


def tensor_in(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """The tensor whose first element is at byte ``offset`` of ``memory``."""
    return memory.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)


def array_in(
    memory: torch.Tensor, offset: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int]
) -> Array:
    """The array whose first element is at byte ``offset`` of ``memory``."""
    return np.ndarray(tuple(shape), dtype, memory.numpy().data, offset, tuple(strides))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Values, by their ``numbers``, that share memory: a copy of it, in which bytes that belong to none are zero, and
    the ``offsets`` in bytes of each one's first element."""

    numbers: Sequence[int]
    offsets: Sequence[int]
    memory: torch.Tensor


def overlaps(values: Sequence[Value]) -> Iterator[Overlap]:
    """Values that share memory, except those that have more bytes between them than they have themselves, such as two
    columns of a wide table: they seldom have a common element, and the table may be large."""
    begins, ends = np.array([_addresses(value) for value in values], np.int64).reshape(-1, 2).T
    order = begins.argsort()
    if not (np.maximum.accumulate(ends[order])[:-1] > begins[order][1:]).any():  # the usual case, of thousands
        return
    places = sorted(zip(begins.tolist(), ends.tolist(), range(len(values)), strict=True))
    run: list[int] = []
    first, last = 0, 0
    for begin, end, number in [*places, (sys.maxsize, sys.maxsize, -1)]:
        if begin >= last:
            if len(run) > 1 and (found := _overlap([values[each] for each in run], run, first, last)):
                yield found
            run, first = [], begin
        if begin < end:
            run.append(number)
            last = max(last, end)


def _overlap(values: Sequence[Value], numbers: Sequence[int], begin: int, end: int) -> Overlap | None:
    offsets = [_address(value) - begin for value in values]
    devices = {value.device if isinstance(value, torch.Tensor) else torch.device("cpu") for value in values}
    if (
        end - begin > sum(value.nbytes for value in values)
        or len(devices) > 1
        or any(offset % value.itemsize for offset, value in zip(offsets, values, strict=True))
        or any(isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()) for value in values)
    ):
        return None
    memory = torch.zeros(-(-(end - begin) // _WIDEST) * _WIDEST, dtype=torch.uint8, device=devices.pop())
    for value, offset in zip(values, offsets, strict=True):
        if isinstance(value, torch.Tensor):
            _fill(tensor_in(memory, offset, value.dtype, value.shape, value.stride()), value)
        else:
            array_in(memory, offset, value.dtype, value.shape, value.strides)[...] = value
    return Overlap(numbers, offsets, memory)


def _addresses(value: Value) -> tuple[int, int]:
    """Of the first byte, and after the last."""
    if isinstance(value, torch.Tensor) and value.is_contiguous():  # faster, with thousands of them
        at = value.data_ptr()
        return at, at + value.nbytes
    at = _address(value)
    width = value.itemsize if isinstance(value, torch.Tensor) else 1
    before, after = _reach(value.shape, strides_of(value))
    return at + before * width, at + after * width + value.itemsize


def _address(value: Value) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def _reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Positions of the first and the last element in memory, from that of the one at index 0."""
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


@torch.no_grad()
def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
