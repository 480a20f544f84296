"""DDP over more than two ranks, where the order of a sum can be seen in its last bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, tiny_regression_data
from support.small import arguments


class Shuffled(nn.Module):
    """Its layers are registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(33, 1)
        self.first = nn.Linear(8, 54)
        self.middle = nn.Linear(54, 33)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(self.last(self.middle(self.first(x).tanh()).tanh()), y)


def trainer(output_dir: Path) -> ds.Trainer:
    torch.manual_seed(0)
    args = arguments(
        output_dir,
        max_steps=6,
        save_steps=3,
        save_in_background=False,
        parallel="ddp",
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    return ds.Trainer(Shuffled(), args, train_dataset=tiny_regression_data(48))


def test_a_run_of_three_ranks_resumes_bit_by_bit(tmp_path: Path) -> None:
    """Gradients are in the same buckets in a leg's first step as in all others."""
    assert_resume_equivalent(trainer, [FaultPlan(Event.STEP_END, count=4)], world_size=3, folder=tmp_path, timeout=200)
