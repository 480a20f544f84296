"""Which parts of a model are units of their own under FSDP2, where weights are tied across them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dalsegno.testing import run_ranks
from support.models import Layered
from support.small import small_trainer


class AutoEncoder(Layered):
    """The last layer's weight is the first one's; a block is used twice."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        super().__init__(nn.Linear(8, 8), block, block, nn.Linear(8, 8))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return super().forward(x, y.expand(-1, 8))


def train(output_dir: Path, max_steps: int, **settings: Any) -> Any:
    settings |= {"max_steps": max_steps, "save_steps": 4, "lr_scheduler_type": "constant"}
    trainer = small_trainer(output_dir, model=AutoEncoder(), **settings)
    trainer.train()
    return trainer.model


def train_in_shards(output_dir: Path, max_steps: int) -> dict[str, Any]:
    model = train(output_dir, max_steps, per_device_train_batch_size=2, parallel="fsdp")
    return {
        "weights": {name: each.full_tensor().tolist() for name, each in model.named_parameters()},
        "tied": model.layers[3].weight is model.layers[0].weight,
        "units": [name for name, part in model.named_modules() if isinstance(part, FSDPModule)],
    }


def test_a_weight_that_is_tied_across_blocks_stays_tied(tmp_path: Path) -> None:
    """After a restart, too; it moves as one process would move it."""
    run_ranks(train_in_shards, 2, tmp_path / "shards", 4)
    first, second = run_ranks(train_in_shards, 2, tmp_path / "shards", 6)
    assert first == second
    assert first["tied"]
    assert first["units"] == ["", "layers.1", "layers.1.0"]
    expected = dict(train(tmp_path / "alone", 6).named_parameters())
    assert first["weights"].keys() == expected.keys()
    for name, weight in first["weights"].items():
        torch.testing.assert_close(torch.tensor(weight), expected[name].detach(), rtol=1e-4, atol=1e-6)
