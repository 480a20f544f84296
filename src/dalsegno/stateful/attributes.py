"""Attributes: the plain attributes that training has changed in objects without a state of their own.

A callback that counts steps in ``self.count`` and has no ``state_dict`` would begin anew in a resumed leg, and nothing
would show it until it stops the run somewhere else. So what differs from what the script built is saved: numbers,
texts, None, small tensors, and lists, tuples, dicts, deques and sets of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("dalsegno")

MOST_ITEMS = 10_000
"""Items of a list, tuple, dict, deque or set that is saved."""
LARGEST_TENSOR = 1 << 20
"""Bytes of a tensor that is saved."""

_PLAIN = (bool, int, float, str, bytes, type(None), np.generic, torch.dtype, torch.device)
_CLOCKS = (time.time, time.perf_counter, time.monotonic)

Values = dict[str, Any]
"""By name, of one object."""


class Attributes:
    """Those of ``objects()``, by key. A component of a checkpoint.

    What an object sets until training begins, in its constructor or in ``on_train_begin``, it sets in the next leg too:
    that is what the script built. What it reads from a clock means nothing to another process, and is not saved.
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
            self._warn([f"{key}.{name}" for name, value in changed.items() if isinstance(value, _TooMany)])
            if kept := {name: value for name, value in changed.items() if not isinstance(value, _TooMany)}:
                state[key] = kept
        return state

    def load_state_dict(self, state: dict[str, Values]) -> None:
        former, self._loaded = self.state_dict(), state
        if self._trains:  # back to an older state of the same process
            built = {key: {name: self._built[key].get(name) for name in values} for key, values in former.items()}
            self._set(built)
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
                value = _read(held)
                is_time = type(value) is float and any(a <= value <= b for a, b in zip(self._since, now, strict=True))
                if value is not _OTHER and not is_time:
                    found[key][name] = value
        return found

    def _set(self, state: Mapping[str, Values]) -> None:
        objects = self._objects()
        for key in state.keys() & objects.keys():
            for name, value in state[key].items():
                _set(objects[key], name, value)

    def _warn(self, names: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._named]:
            self._named.update(new)
            logger.warning(
                "a resumed run will differ from an uninterrupted one: %s: more than %d items, which no checkpoint "
                "contains. Give the class state_dict and load_state_dict",
                ", ".join(new),
                MOST_ITEMS,
            )


class _TooMany(int):
    """Stands for a value with so many items."""


_OTHER: Final = object()
"""Stands for a value that is not plain."""


def _read(value: Any) -> Any:
    """A copy of a plain value, with a list for a deque or set; :data:`_OTHER` for another."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is Tensor:
        is_small = value.nbytes <= LARGEST_TENSOR and value.layout == torch.strided and not value.requires_grad
        return value.detach().clone() if is_small else _OTHER
    if not isinstance(value, list | tuple | dict | deque | set):
        return _OTHER
    if len(value) > MOST_ITEMS:
        first = next(iter(value.values() if isinstance(value, dict) else value))
        return _OTHER if _read(first) is _OTHER else _TooMany(len(value))
    if isinstance(value, dict):
        if not all(type(name) in (str, int) for name in value):
            return _OTHER
        read = {name: _read(each) for name, each in value.items()}
        return _OTHER if _is_unread(read.values()) else read
    items = [_read(each) for each in (sorted(value, key=repr) if isinstance(value, set) else value)]
    return _OTHER if _is_unread(items) else tuple(items) if type(value) is tuple else items


def _is_unread(items: Any) -> bool:
    return any(each is _OTHER or isinstance(each, _TooMany) for each in items)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        return both and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _set(holder: object, name: str, value: Any) -> None:
    """Into the container that is there, if its type is to stay: others may hold it."""
    here = getattr(holder, name, None)
    copy = _read(value)
    if (isinstance(here, dict) and isinstance(copy, dict)) or (isinstance(here, set) and isinstance(copy, list)):
        here.clear()
        here.update(copy)
    elif isinstance(here, deque | list) and isinstance(copy, list):
        here.clear()
        here.extend(copy)
    elif isinstance(copy, Tensor) and isinstance(here, Tensor):
        setattr(holder, name, copy.to(here.device))
    else:
        setattr(holder, name, copy)
