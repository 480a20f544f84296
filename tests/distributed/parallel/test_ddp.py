"""DDP over more than two ranks, where the order of a sum can be seen in its last bits."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
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


def own_loop(output_dir: Path, max_steps: int, find_unused_parameters: bool) -> tuple[bytes, list[str]]:
    """The weights after a loop around torch's own DDP, and the warnings of its leg about DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Shuffled(), find_unused_parameters=find_unused_parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = tiny_regression_data(48)
    sampler = DistributedSampler(data, collectives.world_size(), collectives.rank(), shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    args = arguments(output_dir, max_steps=max_steps, save_steps=3)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    return weights.numpy().tobytes(), [text for text in warnings if "find_unused_parameters=True" in text]


def test_a_loop_by_hand_is_exact_on_three_ranks_if_ddp_keeps_its_buckets_and_warns_if_not(tmp_path: Path) -> None:
    whole = run_ranks(own_loop, 3, tmp_path / "whole", 6, True)
    run_ranks(own_loop, 3, tmp_path / "parts", 3, True)
    parts = run_ranks(own_loop, 3, tmp_path / "parts", 6, True)
    assert parts == whole

    assert run_ranks(own_loop, 3, tmp_path / "other", 3, False)[0][1] == []
    warned = [warnings for _, warnings in run_ranks(own_loop, 3, tmp_path / "other", 6, False)]
    assert [len(each) for each in warned] == [1, 0, 0]
