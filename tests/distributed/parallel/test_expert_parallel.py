"""A model whose experts the user has spread over the ranks that read different data: expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks
from support import layouts
from support.small import small_trainer

EXPERTS = 4


class Mixture(nn.Module):
    """Every expert sees every sample; a gate weighs their outputs. Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.leave = nn.Linear(8, EXPERTS), nn.Linear(8, 1)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        shares = self.gate(x).softmax(-1)
        if isinstance(self.experts, DTensor):
            mixed = self._mixed_by_all(x, shares, self.experts.to_local())
        else:
            mixed = torch.einsum("be,bi,eij->bj", shares, x, self.experts)
        return nn.functional.mse_loss(self.leave(torch.tanh(mixed)), y)

    def _mixed_by_all(self, x: Tensor, shares: Tensor, own: Tensor) -> Tensor:
        """Send all samples to each rank's experts; add up what they return."""
        rank, first = dist.get_rank(), dist.get_rank() * len(own)
        every, weighed = (torch.cat(all_gather(each)) for each in (x, shares))  # type: ignore[no-untyped-call]
        outputs = torch.einsum("be,bi,eij->bj", weighed[:, first : first + len(own)], every, own)
        summed: Tensor = all_reduce(outputs)  # type: ignore[no-untyped-call]
        return summed[rank * len(x) : (rank + 1) * len(x)]


def spread(model: Mixture) -> ds.Parallelized:
    """Split the experts, and reduce gradients to their mean over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0)]))

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= mesh.size()
        if not isinstance(parameter, DTensor):  # those of an expert have reached it from all ranks
            dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return ds.Parallelized(mesh, data="ep")


def train(folder: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights at the first step of this leg and after the last. Each step takes all samples."""
    model = Mixture()
    parallel: Any = spread(model) if dist.is_initialized() else "none"
    batch = layouts.SAMPLES // (dist.get_world_size() if dist.is_initialized() else 1)
    settings = {"max_steps": steps, "save_steps": 1, "logging_steps": 1, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": batch, "max_grad_norm": 0.1, "num_train_epochs": 10}
    first: list[dict[str, Any]] = []

    class Restored(ds.Callback):
        def on_train_begin(self, ctx: Any) -> None:
            first.append(layouts.as_lists(layouts.weights(ctx.model)))

    small_trainer(
        folder, JsonLogger(), Restored(), model=model, length=layouts.SAMPLES, parallel=parallel, **settings
    ).train()
    return first[0], layouts.as_lists(layouts.weights(model))


def test_experts_that_are_spread_train_as_in_one_process_and_resume_there(tmp_path: Path) -> None:
    """Losses, gradient norms and weights; a checkpoint of one fits the other, bit by bit."""
    [(_, alone)] = run_ranks(train, 1, tmp_path / "one", 4)
    (_, saved), other = run_ranks(train, 2, tmp_path / "spread", 2)
    assert other[1] == saved
    [(restored, _)] = run_ranks(train, 1, tmp_path / "spread", 3)
    assert restored == saved
    (_, found), _ = run_ranks(train, 2, tmp_path / "spread", 4)
    for name, expected in alone.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    ours, theirs = ([*read_records(tmp_path / name / "logs/train.jsonl")] for name in ("spread", "one"))
    for key in ("loss", "grad_norm"):
        of_each = [[each[key] for each in records if key in each] for records in (ours, theirs)]
        assert of_each[0] == pytest.approx(of_each[1], rel=1e-3)
        assert len(of_each[0]) == 4
