"""Attributes: the plain attributes that training has changed in objects without a state of their own.

A callback that counts steps in ``self.count`` and has no ``state_dict`` would begin anew in a resumed leg, and nothing
would show it until it stops the run somewhere else. So what differs from what the script built is saved: numbers,
texts, None, small tensors, and lists, tuples, dicts, deques and sets of them. Attributes are read and set in the
object's ``__dict__``, past its properties.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("dalsegno")

MOST_ITEMS = 10_000
"""Items of an attribute that is saved, those within its items included."""
LARGEST = 1 << 20
"""Bytes of a tensor, or characters of a text, that is saved."""

_DEEPEST = 20
_PLAIN = {bool, int, float, str, bytes, type(None), torch.dtype, torch.device}
_DICTS = (dict, Counter, OrderedDict, defaultdict)
_CLOCKS = (time.time, time.perf_counter, time.monotonic)

Values = dict[str, Any]
"""By name, of one object."""


class Attributes:
    """Those of ``objects()``, by key. A component of a checkpoint.

    What an object sets until training begins, in its constructor or in ``on_train_begin``, it sets in the next leg too:
    that is what the script built. What it reads from a clock means nothing to another process, and is not saved. Nor
    are True, False, None and texts of an object that has also made another one while it trained: they may say so.
    """

    state_scope = "per_rank"
    state_schema = dict[str, dict[str, Any]]
    reshard_note = "those of the first rank"

    def __init__(self, objects: Callable[[], Mapping[str, object]]) -> None:
        self._objects = objects
        self._since = [clock() for clock in _CLOCKS]
        self._before: dict[str, Values] = {}
        self._built: dict[str, Values] = {}
        self._loaded: dict[str, Values] = {}
        self._trains = False
        self._named: set[str] = set()

    @property
    def state_varies(self) -> Sequence[str]:
        """Fields that two equal runs need not share: those of the objects' own ``state_varies``."""
        found = self._objects().items()
        return [f"{key}.{name}" for key, each in found for name in getattr(each, "state_varies", ())]

    def begin_leg(self) -> None:
        """Call before the objects prepare for the leg."""
        self._trains = False
        self._before = self._read()

    def begin_training(self) -> None:
        """Call once they have: what they were given by :meth:`load_state_dict` is set now."""
        for key, values in self._read().items():
            before, built = self._before.get(key), self._built.setdefault(key, {})
            for name, value in values.items():
                if name not in built or before is None or name not in before or not _same(before[name], value):
                    built[name] = value
        self._trains = True
        self._set(self._loaded)

    def keep(self) -> None:
        """The next leg of this process continues from the present values."""
        self._loaded = self.state_dict()

    def state_dict(self) -> dict[str, Values]:
        if not self._trains:
            return self._loaded
        state = {}
        for key, values in self._read().items():
            built, loaded = self._built.setdefault(key, values), self._loaded.get(key, {})
            changed = {
                name: value for name, value in values.items() if name in loaded or not _same(built.get(name), value)
            }
            self._warn([f"{key}.{name}" for name, value in changed.items() if value is _TOO_MANY])
            has_made = any(value is _OTHER and built.get(name) is not _OTHER for name, value in values.items())
            left_out = {object, *((bool, str, type(None)) if has_made else ())}
            if kept := {name: value for name, value in changed.items() if type(value) not in left_out}:
                state[key] = kept
        return state

    def load_state_dict(self, state: dict[str, Values]) -> None:
        former, self._loaded = self.state_dict(), state
        if self._trains:  # back to an older state of the same process
            self._set({key: {name: self._built[key].get(name, _ABSENT) for name in former[key]} for key in former})
            self._set(state)

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Values]], world_size: int) -> list[dict[str, Values]]:
        return [states[0]] * world_size

    def _read(self) -> dict[str, Values]:
        now = [clock() for clock in _CLOCKS]
        found: dict[str, Values] = {}
        for key, each in self._objects().items():
            found[key] = {}
            for name, held in [*getattr(each, "__dict__", {}).items()]:
                times = zip(self._since, now, strict=True)
                is_time = type(held) is float and held % 1 != 0 and any(a <= held <= b for a, b in times)
                if not is_time:
                    found[key][name] = _read(held)
        return found

    def _set(self, state: Mapping[str, Values]) -> None:
        objects = self._objects()
        for key in state.keys() & objects.keys():
            for name, value in state[key].items():
                _set(vars(objects[key]), name, value)

    def _warn(self, names: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._named]:
            self._named.update(new)
            logger.warning(
                "a resumed run will differ from an uninterrupted one: %s: more than %d items, which no checkpoint "
                "contains. Give the class state_dict and load_state_dict",
                ", ".join(new),
                MOST_ITEMS,
            )


_ABSENT: Final = object()
"""Stands for an attribute that is not there: the class may have one."""
_OTHER: Final = object()
"""Stands for a value that is not plain."""
_TOO_MANY: Final = object()
"""Stands for one with too many items."""


def _read(value: Any) -> Any:
    """A copy of a plain value, with a list for a deque or set."""
    try:
        return _copy(value, [MOST_ITEMS], _DEEPEST)
    except _NotPlain as error:
        return error.stands_for


class _NotPlain(Exception):
    def __init__(self, stands_for: object) -> None:
        self.stands_for = stands_for


def _copy(value: Any, room: list[int], deepest: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.number | np.bool_):
        if kind in (str, bytes) and len(value) > LARGEST:
            raise _NotPlain(_OTHER)
        return value
    if kind is Tensor and value.nbytes <= LARGEST and value.layout == torch.strided and not value.requires_grad:
        return value.detach().clone()
    is_outermost = deepest == _DEEPEST  # where it is set, a list goes into the deque or set that is there
    if kind not in (list, tuple, dict, *((deque, set, *_DICTS) if is_outermost else ())) or not deepest:
        raise _NotPlain(_OTHER)
    items = list(value.items() if kind in _DICTS else value)  # at once: another thread may add to it meanwhile
    room[0] -= len(items)
    if room[0] < 0:
        _copy(items[0], [MOST_ITEMS], deepest - 1)
        raise _NotPlain(_TOO_MANY)
    if kind in _DICTS:
        if not all(type(name) in (str, int) for name, _ in items):
            raise _NotPlain(_OTHER)
        return {name: _copy(each, room, deepest - 1) for name, each in items}
    copies = [_copy(each, room, deepest - 1) for each in (sorted(items, key=repr) if kind is set else items)]
    return tuple(copies) if kind is tuple else copies


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _set(held: dict[str, Any], name: str, value: Any) -> None:
    """Into the container that is there, if its type is to stay: others may hold it."""
    if value is _ABSENT:
        held.pop(name, None)
    if value is _ABSENT or value is _OTHER or value is _TOO_MANY:
        return
    here, copy = held.get(name), _read(value)
    if (isinstance(here, dict) and isinstance(copy, dict)) or (isinstance(here, set) and isinstance(copy, list)):
        here.clear()
        here.update(copy)
    elif isinstance(here, deque | list) and isinstance(copy, list):
        here.clear()
        here.extend(copy)
    elif isinstance(here, Tensor) and isinstance(copy, Tensor) and (here.shape, here.dtype) == (copy.shape, copy.dtype):
        with torch.no_grad():
            here.copy_(copy)
    else:
        held[name] = copy.to(here.device) if isinstance(here, Tensor) and isinstance(copy, Tensor) else copy
