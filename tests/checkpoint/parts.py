"""Small things to save: a model, an optimizer, components of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from checkpoint.sameness import assert_same
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, ShardedState
from dalsegno.stateful.component import Component


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    inputs = torch.linspace(-1, 1, 20).reshape(4, 5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


class Notes:
    """A replicated component with a settable state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class RankNotes(Notes):
    """A per-rank component; reshard() assigns the saved states to the new ranks in turn."""

    state_scope = "per_rank"

    @classmethod
    def reshard(cls, states: Sequence[Any], world_size: int) -> list[Any]:
        return [list(states[rank::world_size]) for rank in range(world_size)]


class FixedRankNotes(Notes):
    state_scope = "per_rank"


class Saved:
    """The parts of a run."""

    def __init__(self, seed: int = 0, state: Any = None) -> None:
        self.model = small_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.notes = Notes(state)

    @property
    def sharded(self) -> list[ShardedState]:
        return [ModelState(self.model), OptimizerState(self.model, self.optimizer)]

    @property
    def components(self) -> list[Component]:
        return [Component("callbacks.Notes", self.notes)]

    def save(self, manager: CheckpointManager, step: int, **options: Any) -> None:
        train(self.model, self.optimizer, 1)
        self.notes.state = {"step": step, "tensor": torch.full((3,), float(step))}
        manager.save(step, self.sharded, self.components, **options)

    def assert_same_as(self, other: Saved) -> None:
        assert_same(dict(self.model.state_dict()), dict(other.model.state_dict()))
        assert_same(self.optimizer.state_dict(), other.optimizer.state_dict())
        assert_same(self.notes.state, other.notes.state)
