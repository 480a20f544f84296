"""Parcels: Python values that another process rebuilds, as a tree that the checkpoint's codec can encode.

Every node is a list whose first item names its kind. Numbers, strings and tensors are themselves; a class or function
is its importable name; a callback is how it was constructed, its state, and the attributes set since::

    ["callback", {"make": "my_hooks:Beat", "args": [["value", 10]], "kwargs": {}, "state": …, "attributes": {…}}]

Nothing is pickled. Unpacking imports the modules that the names refer to, and calls constructors.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from dalsegno.checkpoint.codec import encode
from dalsegno.errors import CannotSave, ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.stateful.component import Stateful

from .references import reference_to, resolve
from .sameness import same, same_state

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
    """
    Args:
        where: the path to it, for messages: ``callbacks.Beat(every=…)``.

    Raises:
        ConfigurationError: for a value that cannot travel; names its path and what to do.
    """
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
    """Rebuild what :func:`pack` was given."""
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
    make, args, kwargs = callback.construction
    content = _packed_call(make, args, kwargs, where)
    twin = _made(content)
    state, attributes = _state_beyond(callback, twin), {}
    content["state"] = state if state is None else ["value", state]
    if state is not None and isinstance(twin, Stateful):
        twin.load_state_dict(state)
    for name, value in vars(callback).items():
        if name != "construction" and not (hasattr(twin, name) and same(value, getattr(twin, name))):
            attributes[name] = pack(value, f"{where}.{name}")
    content["attributes"] = attributes
    return ["callback", content]


def _unpack_callback(content: Mapping[str, Any]) -> Callback:
    callback: Callback = _made(content)
    if content["state"] is not None and isinstance(callback, Stateful):
        callback.load_state_dict(unpack(content["state"]))
    for name, node in content["attributes"].items():
        setattr(callback, name, unpack(node))
    return callback


def _state_beyond(callback: Callback, twin: Callback) -> Any:
    """The callback's state, if it differs from that of a new one; else None."""
    if not isinstance(callback, Stateful) or not isinstance(twin, Stateful):
        return None
    state = callback.state_dict()
    return None if same_state(state, twin.state_dict()) else state


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
