"""Small models that several tests train. Each takes a batch as keywords and returns its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dalsegno.testing import TinyRegression


class Layered(nn.Module):
    """Layers, one after the other. Returns the mean squared error."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(self.layers(x), y)


class Outputs(nn.Module):
    """``TinyRegression`` with the loss in a dict, as Hugging Face's Trainer needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyRegression()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(x, y)}


class Line(nn.Module):
    """y = w·x + b without any randomness. Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(self.layer(x), y)


class Deep(nn.Module):
    """Two blocks and a head, without any randomness. Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1), number: (batch,)."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.mse_loss(self.head(x), y)


class Normed(nn.Module):
    """With running statistics, which are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.norm(x)), y)


class Tied(nn.Module):
    """Odd sizes, so that two ranks share unevenly, and a weight with two names. Returns the mean squared error."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 7), nn.Linear(7, 8)
        self.back = nn.Linear(7, 8, bias=False)
        self.back.weight = self.second.weight
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, heads)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        deep = torch.tanh(self.first(x))
        heads = self.head(self.norm(self.second(deep) + self.back(deep)))
        return nn.functional.mse_loss(heads.sum(1, keepdim=True), y)
