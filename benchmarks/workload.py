"""Workload: a training job of small steps, and the bare PyTorch loop that everything else is compared with.

A step (forward, backward, clip, AdamW, schedule, and its batch from a DataLoader) takes about half a millisecond on one
thread of a quiet machine: small enough that what a trainer adds can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

STEPS = 500
BATCH = 8
LOGGING_STEPS = 10
MAX_GRAD_NORM = 1.0


class Rows(Dataset[dict[str, Tensor]]):
    """An epoch of ``steps`` batches."""

    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(steps * BATCH, 32, generator=generator)
        self.labels = torch.randn(steps * BATCH, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index], "labels": self.labels[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(features), labels)}


def parts() -> tuple[Model, AdamW, LambdaLR]:
    """The same at every call."""
    torch.manual_seed(0)
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step / STEPS))


def bare_steps(rows: Rows) -> Iterator[None]:
    """A loop that does nothing but train, for ever; it gives way after each step."""
    model, optimizer, scheduler = parts()
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
    while True:
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            yield
