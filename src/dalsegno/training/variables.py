"""Variables: what a loop of the user's own keeps over its steps, in a dict, a list or a deque.

What is loaded goes into the objects that are there, all the way down, because the loop may know each by a name of its
own: ``losses = []; ds.Run(…, state={"kept": {"losses": losses}})``. Only what is of another kind or shape is replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.codec import overlaps, strides_of
from dalsegno.checkpoint.tensor_files import is_plain
from dalsegno.errors import StateMismatch

Container = dict[Any, Any] | list[Any] | deque[Any]
CONTAINERS = (dict, list, deque)

_Way = tuple[Any, ...]
"""Keys and positions that lead to a value."""


class Variables:
    """The values in a container of the user's, as an object with a state."""

    def __init__(self, values: Container) -> None:
        self.values = values

    def state_dict(self) -> Container:
        held = self.values
        if isinstance(held, dict):
            return dict(held)
        return deque(held, held.maxlen) if isinstance(held, deque) else list(held)

    def check_state(self, state: Container) -> None:
        if not isinstance(self.values, type(state)):
            here, saved = type(self.values).__name__, type(state).__name__
            raise StateMismatch(f"state={{…}}: a {saved} was saved, which cannot replace this {here}; give a {saved}")

    def load_state_dict(self, state: Container) -> None:
        _Refill(self.values, state).into(self.values, state, ())


class _Refill:
    """Puts the values of ``loaded`` into ``here``."""

    def __init__(self, here: Any, loaded: Any) -> None:
        self._shared_here, self._shared = _shared_memory(here), _shared_memory(loaded)
        self._filled: set[int] = set()

    def into(self, here: Any, loaded: Any, way: _Way) -> Any:
        """The object that has the loaded value: ``here``, if that fits, else ``loaded``."""
        if isinstance(loaded, tuple):
            is_alike = type(here) is type(loaded) and len(here) == len(loaded)
            pairs = zip(here if is_alike else loaded, loaded, strict=True)
            return type(loaded)([self.into(*pair, (*way, at)) for at, pair in enumerate(pairs)])
        if isinstance(loaded, torch.Tensor | np.ndarray):
            # Values that share memory, here or there, keep doing so, or begin or cease to.
            if not _takes(here, loaded) or self._shared_here.get(way) != self._shared.get(way):
                return loaded
            if isinstance(loaded, torch.Tensor):
                here.detach().copy_(loaded)
            else:
                here[...] = loaded
            return here
        # An object that is here in two places may have become two: it is filled once.
        if not isinstance(loaded, CONTAINERS) or not isinstance(here, type(loaded)) or id(here) in self._filled:
            return loaded
        self._filled.add(id(here))
        before, after = dict(_items(here)), dict(_items(loaded))
        values = {key: self.into(before.get(key), value, (*way, key)) for key, value in after.items()}
        here.clear()
        if isinstance(here, dict):
            here.update(values)
        else:
            here.extend(values.values())
        return here


def _takes(here: object, loaded: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether a tensor or an array is like the loaded one, and may be written to."""
    if isinstance(loaded, torch.Tensor):
        may_be_written = (
            isinstance(here, torch.Tensor)
            and is_plain(here)
            and here.is_leaf
            and not here.is_inference()
            and here.requires_grad == loaded.requires_grad
        )
    else:
        may_be_written = isinstance(here, np.ndarray) and here.flags.writeable
    return (
        may_be_written
        and type(here) is type(loaded)
        and (here.shape, here.dtype) == (loaded.shape, loaded.dtype)
        and strides_of(here) == strides_of(loaded)
        and 0 not in strides_of(here)
    )


def _shared_memory(values: Any) -> dict[_Way, set[tuple[_Way, int]]]:
    """Of each tensor or array that shares memory with others: the ways to all of them, and where they begin in it."""
    found = dict(_memories(values, (), 0))
    ways, shared = [*found], dict[_Way, set[tuple[_Way, int]]]()
    for each in overlaps([*found.values()]):
        group = {(ways[number], offset) for number, offset in zip(each.numbers, each.offsets, strict=True)}
        shared |= {way: group for way, _ in group}
    return shared


def _memories(value: Any, way: _Way, depth: int) -> Iterator[tuple[_Way, Any]]:
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            yield way, value
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            yield way, value
    elif isinstance(value, (*CONTAINERS, tuple)) and depth < 100:  # one may contain itself
        for key, each in _items(value):
            yield from _memories(each, (*way, key), depth + 1)


def _items(values: Any) -> Iterator[tuple[Any, Any]]:
    return iter(values.items() if isinstance(values, dict) else enumerate(values))
