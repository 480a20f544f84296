"""What is exchanged between ranks: by a block of code, or by the handlers of each callback."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dalsegno as ds
from dalsegno.events.table import Event

_OF_NEXT_STEP = list(Event)[list(Event).index(Event.STEP_BEGIN) : list(Event).index(Event.STEP_END)]
"""Events in which the step that they belong to is not counted yet."""


class Exchanges(TorchDispatchMode):
    """Counts the collectives, sends and receives within the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the operators of its parts
        name = func._schema.name.rpartition(":")[2].replace("_", "")  # allreduce_ and all_reduce are two doors to one
        if "c10d" in func.namespace and not name.startswith(("wait", "wrap")):  # what follows one
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def of_callbacks(patched: pytest.MonkeyPatch) -> dict[str, Counter[int]]:
    """Count the exchanges in the handlers of each callback from now on: by its key and the step."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    bound = ds.Callback.bound_handlers

    def bound_handlers(self: ds.Callback, binder: Any) -> Any:
        counts = found[self.key]
        return [(event, _counting(handler, event, counts)) for event, handler in bound(self, binder)]

    patched.setattr(ds.Callback, "bound_handlers", bound_handlers)
    return found


def _counting(handler: Callable[[Any], Any], event: Event, counts: Counter[int]) -> Callable[[Any], Any]:
    def count(ctx: Any) -> Any:
        step = ctx.state.global_step + (event in _OF_NEXT_STEP)
        with Exchanges() as exchanges:
            answer = handler(ctx)
        counts[step] += exchanges.counts.total()
        return answer

    return count
