"""Collected: what callbacks of another library log themselves, on its way into dalsegno's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dalsegno.distributed import collectives
from dalsegno.events.contexts import LogContext, TrainerLike


class Collected:
    """In a step or an evaluation with a record, values are added to that record; in a step without one, they are
    dropped; outside of both, they are a separate record. On several ranks, a record gets those of rank 0."""

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer = trainer
        self._values: dict[str, Any] | None = None
        self._is_dropped = False

    def begin(self, *, has_record: bool) -> None:
        """A step or an evaluation begins."""
        self._values, self._is_dropped = ({} if has_record else None), not has_record

    def end(self) -> None:
        """End it; remaining values are for the record of the epoch's end."""
        self._values, self._is_dropped = self._values or None, False

    def add(self, values: Mapping[str, Any]) -> None:
        numbers = {name: as_number(value) for name, value in values.items()}
        if self._values is not None:
            self._values.update(numbers)
        elif not self._is_dropped:
            self._trainer.log(dict(numbers))

    def move_into(self, ctx: LogContext) -> None:
        """Move the values into the record of the step or evaluation. Collective."""
        if ctx.kind in ("train", "eval"):
            here = self._values or {}
            ctx.logs.update(collectives.from_rank_zero(lambda: here) if collectives.initialized() else here)
            self._values = None if self._values is None else {}


def as_number(value: Any) -> Any:
    """Return a tensor of one element, or a number of numpy, as Python's; waits for the device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value
