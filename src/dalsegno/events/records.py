"""Records: on_log_step, whose handlers may add to a record, then on_log, whose handlers write it."""

from __future__ import annotations

from typing import Any

import torch

from dalsegno.errors import CannotSave
from dalsegno.state import owner_of

from .dispatcher import Dispatcher


def fire_record(dispatcher: Dispatcher, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
    """Fire on_log_step and on_log with one record. Tensors of one element become numbers.

    Raises:
        CannotSave: if a larger tensor was logged, which no log and no checkpoint can hold; names who may have.
    """
    if dispatcher.log_step:
        dispatcher.log_step.fill(logs, kind, evaluated_weights)
        dispatcher.log_step.fire()
    for name, value in logs.items():
        if isinstance(value, torch.Tensor):
            logs[name] = _number(dispatcher, name, value)
    if dispatcher.log:
        dispatcher.log.fill(logs, kind, evaluated_weights)
        dispatcher.log.fire()


def _number(dispatcher: Dispatcher, name: str, value: torch.Tensor) -> float:
    if value.numel() != 1:
        authors = ", ".join(owner_of(handler) for handler in dispatcher.log_step) or "the program"
        raise CannotSave(
            f"record key {name!r}: a tensor of shape {tuple(value.shape)}, logged by one of: {authors}; log a "
            "number, such as its mean"
        )
    return value.item()
