"""What is exchanged between ranks: by a block of code, or by the handlers of each callback."""

from __future__ import annotations

from collections import Counter
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


def of_callbacks(patched: pytest.MonkeyPatch, step: int) -> Counter[str]:
    """Count the exchanges in the handlers of each callback in that step, by its key."""
    found = Counter[str]()
    bound = ds.Callback.bound_handlers

    def bound_handlers(self: ds.Callback, binder: Any) -> Any:
        return [(event, counting(self.key, event, handler)) for event, handler in bound(self, binder)]

    def counting(key: str, event: Event, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def count(ctx: Any) -> Any:
            if ctx.state.global_step + (event in _OF_NEXT_STEP) != step:
                return handler(ctx)
            with Exchanges() as exchanges:
                answer = handler(ctx)
            found[key] += exchanges.counts.total()
            return answer

        return count

    patched.setattr(ds.Callback, "bound_handlers", bound_handlers)
    return found
