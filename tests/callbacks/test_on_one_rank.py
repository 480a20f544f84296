"""What one rank alone has (only padding, a request, a shorter loader) leaves no other waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.layouts import layout_trainer
from dalsegno import callbacks
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.models import Deep
from support.ranked import Numbered
from support.small import arguments


class Routed(nn.Module):
    """One router over three experts. Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        chosen = self.router(x).softmax(-1).amax(-1, keepdim=True)
        return nn.functional.mse_loss(self.out(x) * chosen, y)


def train_with_only_padding(output_dir: Path) -> tuple[int, str, list[list[str]]]:
    """Five samples, two on each rank a step: each second step has none for rank 1."""
    torch.manual_seed(0)
    records: list[list[str]] = []
    observers = [
        callbacks.ExpertLoadBalance(every=1),
        callbacks.LogInputSummaries(),
        callbacks.FlopUtilization(peak_flops_per_device=1e12),
        callbacks.SlowRankDetector(),
        callbacks.DurationProfiler(),
        callbacks.RateProfiler(),
        Listener({"on_log": lambda ctx: records.append(sorted(ctx.logs)) if ctx.kind == "train" else None}),
    ]
    args = arguments(output_dir, max_steps=4, per_device_train_batch_size=2, logging_steps=1, parallel="ddp")
    result = ds.Trainer(Routed(), args, train_dataset=tiny_regression_data(5), callbacks=observers).train()
    return result.global_step, result.reason, records


def test_a_rank_with_only_padding_reduces_what_the_others_do(tmp_path: Path) -> None:
    first, second = run_ranks(train_with_only_padding, 2, tmp_path)
    assert first == second
    step, reason, records = first
    assert (step, reason) == (4, "finished")
    assert all({"expert_load/router/max", "input/x/mean", "rank_runtime"} <= set(record) for record in records)


def train_with_requests(output_dir: Path, requested: str) -> tuple[int, str, list[int]]:
    """After step 4 rank 1 alone requests something, where the ranks do not agree before the next step's end."""
    logged: list[int] = []

    def act(ctx: Any) -> None:
        if collectives.rank() == 1 and ctx.step == 4:
            setattr(ctx.control, requested, True)

    listener = Listener({"on_step_done": act, "on_log": lambda ctx: logged.append(ctx.state.global_step)})
    measuring = [listener, callbacks.ComputeNorm(), callbacks.NaNChecker(), callbacks.GradNormLogger()]
    result = layout_trainer(output_dir, "fsdp", measuring, logging_steps=8, eval_steps=8).train()
    return result.global_step, result.reason, logged


@pytest.mark.parametrize("requested", ["should_log", "should_evaluate"])
def test_what_one_rank_requests_is_foreseen_on_none_before_all_know(tmp_path: Path, requested: str) -> None:
    first, second = run_ranks(train_with_requests, 2, tmp_path, requested)
    assert first == second
    step, reason, logged = first
    assert (step, reason) == (8, "finished")
    assert 5 in logged


def train_on_unequal_loaders(output_dir: Path, epochs: float, stop_at: int | None) -> Any:
    """Rank 0 has two batches of its own, rank 1 has four."""
    torch.manual_seed(0)
    data, own = Numbered(24), range(8) if collectives.rank() == 0 else range(8, 24)
    batches = [torch.utils.data.default_collate([data[own[i + j]] for j in range(4)]) for i in range(0, len(own), 4)]
    seen: list[tuple[float, float]] = []

    def note(ctx: Any) -> None:
        seen.append((ctx.state.epoch, float(ctx.lr)))
        if ctx.step == stop_at:
            ctx.control.stop("this part is over")

    epoch_by_epoch = {"logging_strategy": "epoch", "save_strategy": "epoch", "save_steps": 1, "logging_steps": 1}
    args = arguments(output_dir, num_train_epochs=epochs, **epoch_by_epoch, disable_tqdm=True)
    trainer = ds.Trainer(Deep(), args, train_dataloader=batches, callbacks=[Listener({"on_step_end": note})])
    result = trainer.train()
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    return (result.global_step, result.reason, trainer.state.max_steps, seen), weights


@pytest.mark.parametrize("epochs", [2, 0.5])
def test_loaders_of_unequal_length_make_one_schedule(tmp_path: Path, epochs: float) -> None:
    """An epoch is as long as the longest of them, on all ranks: for its end, what is due there, and the rates."""
    (first, weights), (second, others) = run_ranks(train_on_unequal_loaders, 2, tmp_path, epochs, None)
    assert first == second
    assert weights == others
    steps = int(4 * epochs)
    rates = [0.01 * (1 - step / steps) for step in range(steps)]
    assert first[:3] == (steps, "finished", steps)
    assert [place for place, _ in first[3]] == [(1 + step) / 4 for step in range(steps)]
    assert [rate for _, rate in first[3]] == pytest.approx(rates)


def test_a_run_on_them_goes_on_with_its_next_epoch(tmp_path: Path) -> None:
    run_ranks(train_on_unequal_loaders, 2, tmp_path / "cut", 2, 4)
    (resumed, weights), _ = run_ranks(train_on_unequal_loaders, 2, tmp_path / "cut", 2, None)
    (whole, expected), _ = run_ranks(train_on_unequal_loaders, 2, tmp_path / "whole", 2, None)
    assert resumed[:3] == whole[:3]
    assert resumed[3] == whole[3][4:]
    assert weights == expected
