"""A model whose parameters are frozen for the most part, and what saves it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, ShardedState

FROZEN = "model/frozen-00000.safetensors"


def model_of(seed: int = 0) -> nn.Module:
    """A frozen base with a small trained head."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 4))
    model[0].requires_grad_(False)
    return model


class Part:
    """A model with a frozen base, its optimizer, and the manager that saves them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.model = model_of(seed)
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=0.1)
        self.manager = CheckpointManager(folder)

    @property
    def sharded(self) -> list[ShardedState]:
        return [ModelState(self.model), OptimizerState(self.model, self.optimizer)]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.linspace(-1, 1, 16).reshape(2, 8)).square().mean().backward()
        self.optimizer.step()

    def save(self, step: int) -> Path:
        self.step()
        return self.manager.save(step, self.sharded, [])

    def load(self, path: Path | None = None) -> None:
        checkpoint = self.manager.find(path)
        assert checkpoint is not None
        self.manager.load(checkpoint, self.sharded, [])


def content(part: Part) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in part.model.state_dict().items()}
