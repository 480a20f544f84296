"""ScopedFlags: sets torch's global flags during training, and restores them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import TrainBeginContext, TrainEndContext

from .argument_checks import mapping


class ScopedFlags(Callback):
    """Sets flags of ``torch.backends``, such as TF32, while training runs, and restores them however it ends.

    ::

        ScopedFlags({"cuda.matmul.allow_tf32": True, "cudnn.benchmark": True})

    Args:
        flags: values by name below ``torch.backends``; a value must have the flag's type.

    Raises:
        UnknownName: for an unknown flag; the message names the nearest.
        ConfigurationError: for a value of another type.
    """

    sets_control_flags = False

    def __init__(self, flags: Mapping[str, Any]) -> None:
        for name, value in mapping("ScopedFlags", "flags", flags).items():
            owner, attribute = _place(name)
            present = getattr(owner, attribute)
            if type(value) is not type(present):
                raise ConfigurationError(
                    f"ScopedFlags: {name}={value!r}; torch.backends.{name} is a {type(present).__name__} ({present!r})"
                )
        self._flags = dict(flags)
        self._before: dict[str, Any] = {}

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        for name, value in self._flags.items():
            owner, attribute = _place(name)
            self._before[name] = getattr(owner, attribute)
            setattr(owner, attribute, value)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        while self._before:
            name, value = self._before.popitem()
            owner, attribute = _place(name)
            setattr(owner, attribute, value)


def _place(name: str) -> tuple[Any, str]:
    """Return the module or object that has the flag, and the flag's attribute name."""
    owner: Any = torch.backends
    *path, attribute = name.split(".")
    for step in path:
        _require(owner, step, name)
        owner = getattr(owner, step)
    _require(owner, attribute, name)
    return owner, attribute


def _require(owner: Any, attribute: str, name: str) -> None:
    if attribute.startswith("_") or not hasattr(owner, attribute):
        before = name.rpartition(attribute)[0]
        known = {each for each in (*dir(owner), *dir(type(owner))) if not each.startswith("_")}
        raise UnknownName("ScopedFlags: flag", name, sorted(f"{before}{each}" for each in known))
