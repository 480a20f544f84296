"""Parcels: Python values that another process rebuilds, as a tree that the checkpoint's codec can encode.

Every node is a list whose first item names its kind. Numbers, strings and tensors are themselves; a class or function
is its importable name; a callback is how it was constructed, its state, and the attributes set since::

    ["callback", {"make": "my_hooks:Beat", "args": [["value", 10]], "kwargs": {}, "state": …, "attributes": {…}}]

Nothing is pickled. Unpacking imports the modules that the names refer to, and calls constructors.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import safetensors.torch
import torch

from dalsegno.checkpoint.codec import decode, encode
from dalsegno.errors import CannotSave, ConfigurationError, DamagedCheckpoint
from dalsegno.events.callback import Callback
from dalsegno.stateful.component import State, Stateful

Node = list[Any]

_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_OWN_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__slots__")


def pack(value: Any, where: str) -> Node:
    """``where``: the path to it, for messages: ``callbacks.Beat(every=…)``."""
    if isinstance(value, Callback):
        return pack_callback(value, where)
    if type(value) is _SEQUENCES.get(kind := type(value).__name__):
        return [kind, [pack(each, f"{where}[{number}]") for number, each in enumerate(value)]]
    if type(value) is dict:
        return ["dict", [[pack(key, where), pack(each, f"{where}[{key!r}]")] for key, each in value.items()]]
    if isinstance(value, enum.Enum):
        return _call(type(value), [value.value], {}, where)
    if isinstance(value, PurePath):
        return _call(type(value), [str(value)], {}, where)
    if isinstance(value, partial):
        return _call(partial, [value.func, *value.args], value.keywords, where)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return ["name", reference_to(value, where)]
    try:
        encode(value, where)
    except CannotSave:
        return _pack_object(value, where)
    return ["value", value]


def unpack(node: Node) -> Any:
    kind, content = node[0], node[1]
    if kind == "value":
        return content
    if kind == "name":
        return resolve(content)
    if kind == "callback":
        return _unpack_callback(content)
    if kind == "dict":
        return {unpack(key): unpack(each) for key, each in content}
    if kind == "call":
        return _made(content)
    if kind == "object":
        made = object.__new__(resolve(content["class"]))
        vars(made).update({name: unpack(each) for name, each in content["attributes"].items()})
        return made
    return _SEQUENCES[kind](unpack(each) for each in content)


def pack_callback(callback: Callback, where: str) -> Node:
    """Pack a callback, and check that unpacking it gives an equal one."""
    content = _packed_call(*callback.construction, where)
    twin = _made(content)
    content |= {"state": None, "attributes": {}}
    if isinstance(callback, Stateful) and isinstance(twin, Stateful):
        state = callback.state_dict()
        if not same_state(state, twin.state_dict()):
            content["state"] = ["value", state]
            twin.load_state_dict(state)
    for name, value in vars(callback).items():
        if name != "construction" and not (hasattr(twin, name) and same(value, getattr(twin, name))):
            content["attributes"][name] = pack(value, f"{where}.{name}")
    return ["callback", content]


def _unpack_callback(content: Mapping[str, Any]) -> Callback:
    callback: Callback = _made(content)
    if content["state"] is not None and isinstance(callback, Stateful):
        callback.load_state_dict(unpack(content["state"]))
    for name, node in content["attributes"].items():
        setattr(callback, name, unpack(node))
    return callback


def _pack_object(value: Any, where: str) -> Node:
    kind = type(value)
    if is_dataclass(kind):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return _call(kind, [], given, where)
    if not _is_plain(value):
        name = getattr(value, "__qualname__", kind.__qualname__)
        raise ConfigurationError(
            f"{where}: a {kind.__name__} ({name}) cannot be sent to other processes; create it in on_train_begin, give "
            "the callback state_dict and load_state_dict, or launch with start='fork'"
        )
    attributes = {name: pack(each, f"{where}.{name}") for name, each in vars(value).items()}
    return ["object", {"class": reference_to(kind, where), "attributes": attributes}]


def _is_plain(value: Any) -> bool:
    """Whether an object of a Python class is no more than its attributes."""
    kind = type(value)
    if not hasattr(value, "__dict__") or any(
        getattr(kind, name, None) is not getattr(object, name, None) for name in _OWN_PICKLING
    ):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # it contains more: a file, a generator, a bound method
        return False
    return True


def _call(make: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any], where: str) -> Node:
    return ["call", _packed_call(make, args, kwargs, where)]


def _packed_call(make: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "make": reference_to(make, where),
        "args": [pack(each, f"{where}, argument {number}") for number, each in enumerate(args)],
        "kwargs": {name: pack(each, f"{where}, {name}=") for name, each in kwargs.items()},
    }


def _made(content: Mapping[str, Any]) -> Any:
    make = resolve(content["make"])
    args = [unpack(each) for each in content["args"]]
    return make(*args, **{name: unpack(each) for name, each in content["kwargs"].items()})


_REMEDY = "define it at the top level of a module that the ranks can import, or launch with start='fork'"


def reference_to(thing: Any, where: str) -> str:
    """The name under which another process finds this class or function: ``module:outer.inner``. Raises
    ConfigurationError if no import leads to it: a lambda, something inside a function, in a notebook or on standard
    input. ``where``: what refers to it, for the message."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ConfigurationError(f"{where}: a {type(thing).__name__} cannot be sent to other processes; {_REMEDY}")
    if "<lambda>" in name:
        raise ConfigurationError(f"{where}: a lambda has no name that another process could import; {_REMEDY}")
    if "<locals>" in name:
        raise ConfigurationError(f"{where}: {name} is defined inside a function; {_REMEDY}")
    if module == "__main__" and not main_is_importable():
        raise ConfigurationError(f"{where}: {name} is defined in a notebook or on standard input; {_REMEDY}")
    for path in (name, f"{name}.function"):  # a function that ds.on decorates is an attribute of the callback
        reference = f"{module}:{path}"
        try:
            if resolve(reference) is thing:
                return reference
        except (ImportError, AttributeError):
            continue
    raise ConfigurationError(f"{where}: {module}.{name} is not what is found under that name; {_REMEDY}")


def resolve(reference: str) -> Any:
    """Import what :func:`reference_to` named. Raises ImportError, AttributeError if it is not there."""
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def main_is_importable() -> bool:
    """Whether multiprocessing can import the program in another process: it is a file or a module."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", "")).is_file()


def same(one: Any, other: Any, _seen: frozenset[int] = frozenset()) -> bool:
    """Whether both contain equal values.

    What only a constructor can make (locks, files) counts as equal if it is of the same type.
    """
    if one is other or id(one) in _seen:
        return True
    if type(one) is not type(other):
        return False
    seen = _seen | {id(one)}
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (bool, int, float, complex, str, bytes, set, frozenset, type)):
        return one == other or (one != one and other != other)  # NaN
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(*pair, seen) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], seen) for key in one)
    if isinstance(one, types.FunctionType):
        return one.__code__ is other.__code__
    if isinstance(one, types.MethodType):
        return same(one.__func__, other.__func__, seen)
    return same(vars(one), vars(other), seen) if hasattr(one, "__dict__") else True


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are saved as the same bytes."""
    (json, arrays), (other_json, other_arrays) = encode(one, "state"), encode(other, "state")
    return bool(json == other_json) and same(arrays, other_arrays)


def write_private(path: Path, tree: State) -> None:
    """Write ``tree`` as ``path``, and a file of its tensors beside it. Replaces neither atomically."""
    content, arrays = encode(tree, path.stem)
    _write(path, json.dumps(content, allow_nan=False).encode())
    whole = {name: each.contiguous().cpu().clone() for name, each in arrays.items()}
    _write(_tensors(path), safetensors.torch.save(whole))


def read_private(path: Path) -> State:
    """Read what :func:`write_private` wrote. Raises FileNotFoundError if nothing was."""
    content = json.loads(path.read_bytes())
    stored = safetensors.torch.load(_tensors(path).read_bytes())

    def read_array(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        found = stored.get(name)
        if found is None or found.dtype != dtype or list(found.shape) != shape:
            raise DamagedCheckpoint(f"{path}: the tensor {name!r} is missing")
        return found

    return decode(content, read_array, path.stem)


def _tensors(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
