"""Optimizer: the user's optimizer as callbacks see it under a trainer that computes gradients inside its step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class Optimizer:
    """Runs the hooks before a step itself: Lightning's closure computes gradients after torch's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._before_step: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._before_step)
        self._before_step[handle.id] = hook
        return handle

    def run_pre_hooks(self) -> None:
        """Call the hooks: gradients are complete and clipped, and the update follows."""
        for hook in tuple(self._before_step.values()):
            hook(self._optimizer, (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
