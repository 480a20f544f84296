"""Wrappers: around a method of one object, where a library has no callback; and those around an optimizer, removed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object: ``around`` is called with the original and its arguments. Returns the undo."""
    original, own = getattr(owner, name), vars(owner).get(name)

    @wraps(original)
    def wrapper(*args: Any, **named: Any) -> Any:
        return around(original, *args, **named)

    setattr(owner, name, wrapper)
    return partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, on which hooks would never run."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
