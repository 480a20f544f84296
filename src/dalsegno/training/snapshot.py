"""Takeback: what an evaluation has changed before it was broken off, taken back.

It is going to be done again, from its first batch on, in another leg. So whatever it has drawn from the random
generators, and told callbacks that keep a state, must not have happened. Model and optimizer it does not change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dalsegno.distributed.rng import RandomState
from dalsegno.events.callback import Callback
from dalsegno.events.table import Event
from dalsegno.stateful.component import Stateful

_IN_EVALUATION = {
    Event.EVALUATE_BEGIN,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.PREDICTION_STEP,
    Event.EVALUATE_END,
}


class StateSnapshot:
    """Remembers how things are now. Costs about 0.1 ms, and what ``state_dict`` costs of each callback that listens."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._random = RandomState(0)
        listening = [each for each in callbacks if not _IN_EVALUATION.isdisjoint(each.handled_events())]
        targets: list[Stateful] = [self._random, *(each for each in listening if isinstance(each, Stateful))]
        self._states = [(target, tree_map(_own_copy, target.state_dict())) for target in targets]

    def restore(self) -> None:
        """Let all be as it was."""
        for target, state in self._states:
            target.load_state_dict(state)


def _own_copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
