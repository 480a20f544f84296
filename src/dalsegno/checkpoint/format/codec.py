"""Encode state trees as JSON and tensors, and decode them bit by bit. Decoding never runs code.

Values that JSON has are stored as they are. Any other value is an object whose first key begins with ``$``, such as
``{"$tuple": [1, 2]}`` or ``{"$tensor": "history[3]", "dtype": "float32", "shape": [3]}``; the tensor's bytes are stored
under that name in the file of tensors beside the JSON. Tensors are decoded on the CPU. Of a sparse or quantized tensor
the values are stored that it consists of: ``{"$composite": "sparse_coo", "shape": [2, 2], "values": {"indices": …}}``.
"""

from __future__ import annotations

import base64
import enum
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dalsegno.errors import CannotSave, DamagedCheckpoint
from dalsegno.stateful.component import State

from . import composites
from .layout import DTYPES, is_plain, is_shape, name_of

Json = Any
Arrays = dict[str, torch.Tensor]
ReadArray = Callable[[str, torch.dtype, list[int]], torch.Tensor]

DEEPEST = 100
"""Levels of nesting. A deeper state, or one that contains itself, is refused."""

_ALLOWED = (
    "a state may contain dict and OrderedDict (with str or int keys), list, tuple, str, bytes, bool, int, float, None, "
    "numpy scalars and arrays, torch tensors, torch.Size, torch.dtype and torch.device"
)
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcmM]\d{1,2}(\[\d{0,9}[a-zA-Z]{1,2}\])?")


def encode(tree: State, where: str) -> tuple[Json, Arrays]:
    """Encode ``tree`` as JSON, and its arrays and tensors by their path: ``history[3]``.

    The tensors may share memory with the tree: copy them before training continues.

    Args:
        where: key of its component, such as ``callbacks.MyCb``; only for messages.

    Raises:
        CannotSave: if the tree contains a value that cannot be saved; names its path.
    """
    found = _Found(where, {})
    return _encode(tree, where, found, 0), found.arrays


def inside(where: str, key: object) -> str:
    """Path of the item ``key`` of the dict at the path ``where``."""
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{key!r}]"


# --- encoding: by exact type; subclasses are refused --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """Arrays found so far in the state of the component ``whose``."""

    whose: str
    arrays: Arrays

    def add(self, tensor: torch.Tensor, where: str) -> str:
        name = where.removeprefix(self.whose).removeprefix(".")
        while name in self.arrays:
            name += "'"
        self.arrays[name] = tensor
        return name


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
    items = {key: _encode(each, inside(where, key), found, depth + 1) for key, each in value.items()}
    if all(type(key) is str and not key.startswith("$") and type(_key_as_json(key)) is str for key in items):
        return items
    return {"$dict": [[_key_as_json(key), each] for key, each in items.items()]}


def _key_as_json(key: str | int) -> Json:
    return _encode_str(key) if isinstance(key, str) else _encode_int(key)


def _encode_list(value: list[Any], where: str, found: _Found, depth: int) -> Json:
    kinds = {*map(type, value)}  # fast paths for thousands of names, and for the numbers of a random generator
    if (kinds == {str} and "".join(value).isascii()) or (kinds == {int} and 0 <= min(value) <= max(value) < 1 << 64):
        return value.copy()
    return [_encode(each, f"{where}[{number}]", found, depth + 1) for number, each in enumerate(value)]


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
    name = found.add(tensor, where)
    return {"$array": name, "dtype": value.dtype.str, "shape": list(value.shape)}


def _encode_tensor(value: torch.Tensor, where: str, found: _Found, depth: int) -> Json:
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        raise CannotSave(
            f"{where}: cannot save a {_class(value)}, only plain tensors; take its full_tensor() or to_local() first"
        )
    if not is_plain(value):
        if composites.is_composite(value) and is_shape(list(value.shape)):
            kind, values = composites.take_apart(value)
            encoded = _encode_dict(values, where, found, depth)
            return {"$composite": kind, "shape": list(value.shape), "values": encoded}
        raise CannotSave(
            f"{where}: cannot save a tensor with {value.layout}, {value.dtype} on {value.device}; "
            f"it must be dense, sparse or quantized, and of one of {', '.join(DTYPES)}"
        )
    name = found.add(value.detach(), where)
    return {"$tensor": name, "dtype": name_of(value.dtype), "shape": list(value.shape)}


_ENCODERS: dict[type, Callable[[Any, str, _Found, int], Json]] = {
    str: _encode_str,
    int: _encode_int,
    float: lambda value, *_: value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()},
    bytes: lambda value, *_: {"$bytes": base64.b64encode(value).decode()},
    dict: _encode_dict,
    OrderedDict: lambda value, *place: {"$ordered": _encode_dict(value, *place)},
    Counter: lambda value, *place: {"$counter": _encode_dict(dict(value), *place)},  # MultiStepLR's milestones are one
    list: _encode_list,
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
    elif isinstance(value, dict | list | tuple | str | int | float):
        base = next(kind for kind in (dict, list, tuple, str, int, float) if isinstance(value, kind))
        hint = f"it would be loaded as a {base.__name__}, so save {base.__name__}(it); "
    elif callable(value):
        hint = "code is never saved; "
    return f"{where}: cannot save a {_class(value)}; {hint}{_ALLOWED}"


# --- decoding: the input may be hostile, so each function checks it ------------------------------------------------


def decode(json: Json, read_array: ReadArray, where: str, depth: int = 0) -> State:
    """Decode the JSON that :func:`encode` returned.

    Args:
        read_array: returns the tensor of a name, dtype and shape; raises if it is not stored.
        where: key of the component, and path in its state; only for messages.
        depth: levels of nesting around it.

    Raises:
        DamagedCheckpoint: if :func:`encode` cannot have written ``json``; names the path.
    """
    if depth > DEEPEST:  # encode() refuses it
        raise DamagedCheckpoint(f"{where}: nested too deeply")
    if isinstance(json, list):
        return [decode(each, read_array, f"{where}[{number}]", depth + 1) for number, each in enumerate(json)]
    if not isinstance(json, dict):
        return json
    tag = next(iter(json), "")
    if not tag.startswith("$"):
        return {key: decode(each, read_array, inside(where, key), depth + 1) for key, each in json.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise DamagedCheckpoint(f"{where}: {tag!r} is unknown to this version of dalsegno")
    try:
        return decoder(json, read_array, where, depth)
    except DamagedCheckpoint:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, struct.error) as error:
        raise DamagedCheckpoint(f"{where}: invalid {tag!r} ({error!r})") from error


def _decode_dict(json: Json, read_array: ReadArray, where: str, depth: int) -> dict[Any, Any]:
    result = {}
    for key, each in json["$dict"]:
        key = decode(key, read_array, where, depth)
        if type(key) is not str and type(key) is not int:
            raise TypeError(f"a key {key!r}")
        result[key] = decode(each, read_array, inside(where, key), depth + 1)
    return result


def _decode_as(kind: type, json: Json, read_array: ReadArray, where: str, depth: int) -> Any:
    decoded = decode(json, read_array, where, depth)
    if type(decoded) is not kind:
        raise TypeError(f"not a {kind.__name__}")
    return decoded


def _decode_dtype(json: Json, read_array: ReadArray, where: str, depth: int) -> torch.dtype:
    found = getattr(torch, json["$dtype"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError("not a dtype of this torch")
    return found


def _decode_numpy_scalar(json: Json, read_array: ReadArray, where: str, depth: int) -> np.generic[Any]:
    (value,) = np.frombuffer(bytes.fromhex(json["hex"]), dtype=_numpy_dtype(json["$scalar"]))
    return value  # type: ignore[no-any-return]


def _decode_array(json: Json, read_array: ReadArray, where: str, depth: int) -> np.ndarray[Any, Any]:
    dtype, shape = _numpy_dtype(json["dtype"]), _shape(json["shape"])
    count = math.prod(shape) * dtype.itemsize
    raw = read_array(json["$array"], torch.uint8, [count]).numpy().tobytes()
    return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()


def _decode_composite(json: Json, read_array: ReadArray, where: str, depth: int) -> torch.Tensor:
    values = decode(json["values"], read_array, where, depth + 1)
    return composites.put_together(json["$composite"], _shape(json["shape"]), values)


_DECODERS: dict[str, Callable[[Any, ReadArray, str, int], State]] = {
    "$str": lambda json, *_: base64.b64decode(json["$str"], validate=True).decode("utf-8", "surrogatepass"),
    "$int": lambda json, *_: int(json["$int"], 16),
    "$float": lambda json, *_: struct.unpack(">d", bytes.fromhex(json["$float"]))[0],
    "$bytes": lambda json, *_: base64.b64decode(json["$bytes"], validate=True),
    "$dict": _decode_dict,
    "$ordered": lambda json, *place: OrderedDict(_decode_as(dict, json["$ordered"], *place)),
    "$counter": lambda json, *place: Counter(_decode_as(dict, json["$counter"], *place)),
    "$tuple": lambda json, *place: tuple(_decode_as(list, json["$tuple"], *place)),
    "$size": lambda json, *_: torch.Size(_shape(json["$size"])),
    "$dtype": _decode_dtype,
    "$device": lambda json, *_: torch.device(json["$device"]),
    "$scalar": _decode_numpy_scalar,
    "$array": _decode_array,
    "$tensor": lambda json, read, *_: read(json["$tensor"], DTYPES[json["dtype"]], _shape(json["shape"])).clone(),
    "$composite": _decode_composite,
}


def _shape(value: Json) -> list[int]:
    if not is_shape(value):
        raise ValueError("not a shape")
    return list(value)


def _numpy_dtype(name: Json) -> np.dtype[Any]:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError("not a dtype of numbers")
    return np.dtype(name)
