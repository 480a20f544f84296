"""Outcome: what rank 0 sends back to the launcher, in a private file: the result and the states of the callbacks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.stateful.component import Stateful
from dalsegno.training.result import TrainResult

from .parcel import pack, unpack
from .private_file import read_private, write_private

_NAME = "outcome.json"


def write_outcome(folder: Path, result: TrainResult | None, callbacks: Sequence[Callback]) -> None:
    """Write the result, and each callback's state; without ``state_dict``, its attributes as far as they can travel."""
    states = [_state(each) for each in callbacks]
    write_private(folder / _NAME, {"result": pack(result, "the result"), "callbacks": states})


def read_outcome(folder: Path, callbacks: Sequence[Callback]) -> TrainResult | None:
    """Read the result, and load the states into ``callbacks``, as if they had been trained with in this process."""
    try:
        outcome: Any = read_private(folder / _NAME)
    except FileNotFoundError:
        return None
    for callback, content in zip(callbacks, outcome["callbacks"], strict=True):
        if isinstance(callback, Stateful):
            callback.load_state_dict(content["state"])
        bare = inspect.unwrap(cast(Any, callback))  # one of another library is behind its adapter
        for name, node in content["attributes"].items():
            setattr(bare, name, unpack(node))
    return cast(TrainResult | None, unpack(outcome["result"]))


def _state(callback: Callback) -> dict[str, Any]:
    if isinstance(callback, Stateful):
        return {"state": callback.state_dict(), "attributes": {}}
    attributes = {}
    for name, value in vars(inspect.unwrap(cast(Any, callback))).items():
        if name != "construction":
            with contextlib.suppress(ConfigurationError):
                attributes[name] = pack(value, name)
    return {"state": None, "attributes": attributes}
