"""Attributes: the plain attributes that training has changed in objects without a state of their own.

A callback that counts steps in ``self.count`` and has no ``state_dict`` would begin anew in a resumed leg, and nothing
would show it until it stops the run somewhere else. So what differs from what the script built is saved: numbers,
texts, None, and lists, tuples, dicts, deques and sets of them. Attributes are read and set in the object's
``__dict__``, past its properties.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

logger = logging.getLogger("dalsegno")

MOST_ITEMS = 10_000
"""Items of an attribute that is saved, those within its items included."""
LARGEST = 1 << 20
"""Characters of a text that is saved."""

_DEEPEST = 20
_PLAIN = {bool, int, float, str, bytes, type(None)}
_DICTS = (dict, Counter, OrderedDict, defaultdict)
_KINDS = (deque, set, *_DICTS[1:])
_CLOCKS = (time.time, time.perf_counter, time.monotonic)
_RECENT = 600.0  # seconds

Values = dict[str, Any]
"""By name, of one object."""


class Attributes:
    """Those of ``objects()``, by key. A component of a checkpoint.

    What an object sets until training begins, in its constructor or in ``on_train_begin``, it sets in the next leg too:
    that is what the script built. What it has lately read from a clock means nothing to another process, and is not
    saved. Nor is anything of one that also makes other objects while it trains: a count may belong to them.
    """

    state_scope = "per_rank"
    state_schema = dict[str, dict[str, Any]]
    reshard_note = "those of the first rank"

    def __init__(self, objects: Callable[[], Mapping[str, object]]) -> None:
        self._objects = objects
        self._before: dict[str, Values] = {}
        self._built: dict[str, Values] = {}
        self._loaded: dict[str, Values] = {}
        self._ended: dict[str, Values] = {}
        self._kinds: dict[str, dict[str, type]] = {}
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
        self._kinds = {
            key: {name: type(held) for name, held in getattr(each, "__dict__", {}).items()}
            for key, each in self._objects().items()
        }
        self._trains = True
        self._set(self._loaded)

    def end_training(self) -> None:
        """Call before the objects clean up."""
        self._ended = self.state_dict()

    def keep(self) -> None:
        """The next leg of this process continues from the values at the former one's end."""
        self._loaded = self._ended

    def state_dict(self) -> dict[str, Values]:
        if not self._trains:
            return self._loaded
        state = {}
        for key, values in self._read().items():
            built, loaded = self._built.setdefault(key, values), self._loaded.get(key, {})
            changed = {
                name: value
                for name, value in values.items()
                if name in loaded or not _same(built.get(name, _ABSENT), value)
            }
            is_whole = all(value is not _OTHER or built.get(name) is _OTHER for name, value in values.items())
            kept = {
                name: each
                for name, each in changed.items()
                if is_whole and each is not _OTHER and each is not _TOO_MANY and self._has_built_kind(key, name)
            }
            self._warn([f"{key}.{name}" for name, each in changed.items() if name not in kept and each is not _OTHER])
            if kept:
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

    def _has_built_kind(self, key: str, name: str) -> bool:
        """Whether the next leg can make a deque, set or dict of this kind, because the script has built one."""
        kind = type(vars(self._objects()[key])[name])
        return kind not in _KINDS or self._kinds.get(key, {}).get(name) is kind

    def _read(self) -> dict[str, Values]:
        now = [clock() for clock in _CLOCKS]
        found: dict[str, Values] = {}
        for key, each in self._objects().items():
            found[key] = {}
            for name, held in [*getattr(each, "__dict__", {}).items()]:
                is_time = type(held) is float and held % 1 != 0 and any(abs(held - clock) < _RECENT for clock in now)
                if not is_time:
                    found[key][name] = _read(held)
        return found

    def _set(self, state: Mapping[str, Values]) -> None:
        objects = self._objects()
        for key in state.keys() & objects.keys():
            for name, value in state[key].items():
                if not callable(getattr(type(objects[key]), name, None)):  # it is a method now
                    _set(vars(objects[key]), name, value)

    def _warn(self, names: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._named]:
            self._named.update(new)
            logger.warning(
                "a resumed run will differ from an uninterrupted one: the training changes %s, which no checkpoint "
                "contains (more than %d items, or beside other objects that the callback makes). Give the class "
                "state_dict and load_state_dict",
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
            raise _NotPlain(_TOO_MANY)
        return value
    is_outermost = deepest == _DEEPEST  # where the kind is known by what is there
    if kind not in (list, tuple, dict, *(_KINDS if is_outermost else ())) or not deepest:
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
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _set(held: dict[str, Any], name: str, value: Any) -> None:
    """As a container of the kind that is there: a new one, since others may hold the old one."""
    if value is _ABSENT:
        held.pop(name, None)
    if value is _ABSENT or value is _OTHER or value is _TOO_MANY:
        return
    here, copy = held.get(name), _read(value)
    if isinstance(here, deque) and isinstance(copy, list):
        copy = deque(copy, here.maxlen)
    elif isinstance(here, set) and isinstance(copy, list):
        copy = set(copy)
    elif isinstance(here, defaultdict) and isinstance(copy, dict):
        copy = defaultdict(here.default_factory, copy)
    elif isinstance(here, Counter | OrderedDict) and isinstance(copy, dict):
        copy = type(here)(copy)
    held[name] = copy
