"""Records: on_log_step, whose handlers may add to a record, then on_log, whose handlers write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dalsegno.errors import CannotSave
from dalsegno.state import Handler, owner_of

from .dispatcher import Dispatcher


def fire_record(dispatcher: Dispatcher, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
    """Fire on_log_step and on_log with one record. Tensors of one element become numbers.

    Raises:
        CannotSave: if a larger tensor was logged, which no log and no checkpoint can hold; names who may have.
    """
    dispatcher.log_step.fire_with(logs, kind, evaluated_weights)
    _convert(logs, dispatcher.log_step)
    if dispatcher.log:
        dispatcher.log.fill(logs, kind, evaluated_weights)
        dispatcher.log.fire()
        _convert(logs, dispatcher.log)


def _convert(logs: dict[str, Any], handlers: Sequence[Handler]) -> None:
    for name, value in logs.items():
        if isinstance(value, torch.Tensor):
            authors = ", ".join(dict.fromkeys(map(owner_of, handlers)))
            logs[name] = number_in_record(name, value, f"one of: {authors}" if authors else "the program")


def number_in_record(name: str, value: torch.Tensor, author: str) -> float:
    """Return the number in a tensor that ``author`` has logged as ``name``.

    Raises:
        CannotSave: if it has several elements.
    """
    if value.numel() != 1:
        raise CannotSave(
            f"record key {name!r}: a tensor of shape {tuple(value.shape)}, logged by {author}; log a number, such as "
            "its mean"
        )
    return value.item()
